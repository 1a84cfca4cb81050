"""Judging whether a third party's rebuild of an engine is the engine that its project published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from harness.engines.base import EngineIdentity
from harness.engines.environment import EngineEnvironment
from harness.engines.provenance import Outcome, verify
from harness.engines.releases import EngineRelease, recipe_for
from harness.verdict import Finding, Verdict

__all__ = ["provenance_findings"]

_NAMED = 6
_VERDICTS = {Outcome.VERIFIED: Verdict.PASS, Outcome.DIFFERS: Verdict.FAIL, Outcome.UNVERIFIED: Verdict.INVALID}


def provenance_findings(identity: EngineIdentity, cache: Path, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Yield ENV001 for a rebuild (a release whose recipe names the official distribution); nothing for an original.

    `cache` keeps the official hashes of each release.
    """
    release = EngineRelease(identity.distribution, identity.version)
    recipe = recipe_for(release)
    if not recipe.official or recipe.official == identity.distribution:
        return
    folder = cache / "provenance" / f"{release.distribution}-{release.version}"
    folder.mkdir(parents=True, exist_ok=True)
    environment = EngineEnvironment(identity.python, release, dict(identity.packages), folder, identity.site_packages)
    seen = verify(environment, recipe=recipe, progress=progress)
    faults = {"differing": seen.differing, "missing": seen.missing, "extra": seen.extra, "edited": seen.edited}
    named = "; ".join(f"{len(files)} {kind}: {', '.join(files[:_NAMED])}" for kind, files in faults.items() if files)
    verified = seen.outcome is Outcome.VERIFIED
    yield Finding(
        "ENV001",
        _VERDICTS[seen.outcome],
        f"{release.requirement}, a rebuild, is {seen.outcome} against {seen.official}: {seen.reason}",
        expected="each Python file equal to the official wheel's, but for reviewed differences",
        actual=f"{seen.identical} of {seen.compared} identical; expected differences: "
        f"{', '.join(sorted(seen.expected)) or 'none'}{'; ' + named if named else ''}",
        n=seen.compared,
        source=seen.source,
        cause="" if verified else "the rebuild was altered, or its official counterpart cannot be read",
        remedy=""
        if verified
        else "use the official wheel (--engine-env PATH_OR_URL_OF_WHEEL), or make the package index "
        "reachable, or review the difference into harness/engines/releases.toml",
    )
