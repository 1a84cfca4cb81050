"""What the harness asks of an engine adapter."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from harness.engines.environment import origin_of
from harness.engines.releases import canonical
from harness.engines.surface import Surface
from harness.errors import EnvironmentFault
from harness.measure.endpoint import Endpoint
from harness.servers.spec import Phase, ServerSpec

__all__ = ["Adapter", "BadSign", "EngineIdentity", "Launch", "LogFigures", "identify", "server_spec"]


@dataclasses.dataclass(frozen=True)
class EngineIdentity:
    """The engine that `python` would run: which distribution, which version, where, and every package beside it.

    `lock` is the sha256 of the lock that the environment was installed from, "" if it is not locked; `origin` says in
    words where the environment comes from. `source` is the URL that the engine itself was installed from (of a git
    repository with the commit, `git+URL@COMMIT`), "" for the package index. `package` is the folder that the engine is
    imported from.
    """

    engine: str
    distribution: str
    version: str
    python: Path
    python_version: str
    packages: Mapping[str, str]
    site_packages: Path
    lock: str = ""
    origin: str = ""
    source: str = ""
    package: str = ""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One server to start.

    `drafter` None means without speculation; `env` holds the pair's variables and the probe's.

    `runner` is the model runner that the launch asks for; which one was in force is read from the server.
    `tokenizer` False serves token ids only (canaries have no tokenizer). `version` is the engine's, "" if not known.
    """

    label: str
    target: Path
    drafter: Path | None
    method: str
    k: int
    dtype: str
    runner: str
    device: str
    tokenizer: bool
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    startup_s: float = 600.0
    version: str = ""


@dataclasses.dataclass(frozen=True)
class BadSign:
    """A log line that means trouble: `pattern` (`re.search`), its meaning, what to do; `fatal` ones fail the suite."""

    pattern: str
    meaning: str
    remedy: str
    fatal: bool = True


@dataclasses.dataclass(frozen=True)
class LogFigures:
    """Where the log tells of acceptance: in lines with `pattern` (`re.search`), after which the figures stand.

    A line comes after `every` verify steps of a request that is alone, or (None) `seconds` after a step at the latest.
    """

    pattern: str
    every: int | None
    seconds: float = 0.0


class Adapter(Protocol):
    """One engine. Stateless: everything that varies is in the `Launch` and the identity."""

    @property
    def name(self) -> str:
        """The engine's name in pairs files and on the command line."""
        ...

    @property
    def bad_signs(self) -> tuple[BadSign, ...]:
        """What must not stand in the log."""
        ...

    def log_figures(self, launch: Launch) -> LogFigures:
        """Return where the log of such a launch tells of acceptance."""
        ...

    def spec(self, identity: EngineIdentity, launch: Launch) -> ServerSpec:
        """Return how to start the server."""
        ...

    def endpoint(self, launch: Launch, base_url: str) -> Endpoint:
        """Return the measuring side of a running server."""
        ...

    def ready(self, launch: Launch, base_url: str) -> Mapping[str, object] | None:
        """Return proof that a generation went through the draft-and-verify loop; None while the server is not up yet.

        Raises:
            HarnessError: the server answers, and waiting longer cannot help.

        """
        ...

    def surface(self, identity: EngineIdentity, launch: Launch, base_url: str) -> Surface:
        """Return what a running server shows, after a generation of its own.

        Raises:
            HarnessError: a page cannot be had.

        """
        ...

    def default_runner(self, device: str) -> str:
        """Return the model runner that the engine takes on "cpu" or "cuda" unless told otherwise."""
        ...

    def runner_in_force(self, log: str) -> str:
        """Return the model runner that the log says is in force. Raises EvidenceError if it does not say."""
        ...

    def timing_is_meaningful(self, runner: str, device: str) -> str:
        """Return "" if speed can be judged under this runner, else the reason why not."""
        ...


_ENV: Mapping[str, str | None] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    # Bytecode halves the import time, which is most of a start-up on a CPU.
    "PYTHONDONTWRITEBYTECODE": None,
    # Else `python -m` takes a folder named like the engine where the run was started (Python 3.11), and packages of the
    # user's site stand before those of the environment: another engine would run than the one that was identified.
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
}


def server_spec(
    launch: Launch,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    phases: tuple[Phase, ...],
    on_path: Sequence[str] = (),
) -> ServerSpec:
    """Return the spec of a launch: the adapter's arguments and variables, then the pair's, which win.

    PYTHONPATH alone is joined: `on_path` comes before the pair's and the probe's.
    """
    own = dict(launch.env)
    path = ":".join(entry for entry in (*on_path, own.pop("PYTHONPATH", "")) if entry)
    merged = {**_ENV, **env, **own, "PYTHONPATH": path or None}
    return ServerSpec(
        name=launch.label,
        argv=(*argv, *launch.args),
        env=tuple(sorted(merged.items())),
        ready_timeout_s=launch.startup_s,
        phases=phases,
    )


# direct_url.json (PEP 610) is there unless a distribution came from a package index.
_IDENTIFY = """
import importlib.metadata as m, importlib.util, json, platform, sys, sysconfig
found = [(d.metadata["Name"], d.version, d.read_text("direct_url.json")) for d in m.distributions()]
spec = importlib.util.find_spec(sys.argv[1])
print(json.dumps({"python": platform.python_version(), "site": sysconfig.get_path("purelib"), "prefix": sys.prefix,
                  "found": found, "package": next(iter(spec.submodule_search_locations or ()), "") if spec else ""}))
"""


def identify(engine: str, distributions: tuple[str, ...], python: Path) -> EngineIdentity:
    """Ask `python` which of `distributions` (most specific first) it has.

    Raises:
        EnvironmentFault: `python` cannot be run, or has none of them.

    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", _IDENTIFY, engine],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        facts = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EnvironmentFault(
            f"{python} could not be asked what it has: {error}", remedy="give the Python of the engine's environment"
        ) from error
    packages = dict(sorted((canonical(name), version) for name, version, _ in facts["found"]))
    urls = {canonical(name): url for name, _, url in facts["found"] if url}
    for distribution in distributions:
        if distribution in packages:
            origin = origin_of(Path(facts["prefix"]), packages)
            return EngineIdentity(
                engine=engine,
                distribution=distribution,
                version=packages[distribution],
                python=python,
                python_version=facts["python"],
                packages=packages,
                site_packages=Path(facts["site"]),
                lock=origin.lock,
                origin=origin.note,
                source=_source(urls.get(distribution, "")),
                package=facts["package"],
            )
    raise EnvironmentFault(
        f"{python} has none of: {', '.join(distributions)}",
        remedy=f"give --engine-python the Python that has {engine}, or --engine-env a release to install",
    )


def _source(direct_url: str) -> str:
    """Return where a distribution was installed from, by its direct_url.json ("" = from a package index)."""
    try:
        facts = json.loads(direct_url)
        vcs = facts.get("vcs_info")
        url: str = facts["url"]
    except (ValueError, KeyError, AttributeError, TypeError):
        return ""
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
