"""Judging whether an engine is what its project published, or what was installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from harness.engines.base import EngineIdentity
from harness.engines.environment import EngineEnvironment
from harness.engines.provenance import Outcome, as_installed, verify
from harness.engines.releases import EngineRelease, rebuilt_from, recipe_for
from harness.verdict import Finding, Verdict, some

__all__ = ["provenance_findings"]

_NAMED = 6
_VERDICTS = {Outcome.VERIFIED: Verdict.PASS, Outcome.DIFFERS: Verdict.FAIL, Outcome.UNVERIFIED: Verdict.INVALID}


def provenance_findings(identity: EngineIdentity, cache: Path, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Yield ENV001: of a rebuild, whether it is the official release; of an original, whether it was changed since.

    A rebuild of which releases.toml has no row cannot be compared. An original that was installed without hashes of its
    files (in place, for development) has nothing to be held against: nothing is said of it. `cache` keeps the official
    hashes of each release.
    """
    release = EngineRelease(identity.distribution, identity.version)
    official = rebuilt_from(identity.distribution)
    if not official:
        yield from _as_installed(identity, release)
        return
    recipe = recipe_for(release)
    if not recipe.official:
        yield Finding(
            "ENV001",
            Verdict.INVALID,
            f"{release.requirement} is a rebuild of {official}, and nobody has reviewed what it differs in",
            expected="a row of harness/engines/releases.toml",
            actual="none of this version",
            source=f"{identity.python}",
            cause="a third party built it: what it runs need not be what the project published",
            remedy=f"use a release that has a row, or {official}'s own wheel, or review this one into the table",
        )
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


def _as_installed(identity: EngineIdentity, release: EngineRelease) -> Iterator[Finding]:
    count, edited = as_installed(identity.distribution, identity.site_packages)
    if not count:
        return
    if Path(identity.package).resolve().parent != identity.site_packages.resolve():
        edited = (f"{identity.site_packages}/{identity.engine}, which {identity.package} stands before", *edited)
    yield Finding(
        "ENV001",
        Verdict.FAIL if edited else Verdict.PASS,
        f"{len(edited)} files of {release.requirement} were changed or removed after it was installed"
        if edited
        else f"{release.requirement} is as it was installed",
        expected="each file with the hash that the installer wrote down",
        actual=some(edited, _NAMED) or f"{count} files",
        n=count,
        source=f"RECORD in {identity.site_packages}",
        cause="someone patched the engine in place, so its version says nothing" if edited else "",
        remedy="reinstall it, or build a wheel of the patched source and install that" if edited else "",
    )
