"""Comparing an installed engine with its official release, with the real pip on synthetic wheels."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.engines.environment import EngineEnvironment
from harness.engines.provenance import CACHE, Outcome, _python_files, verify
from harness.engines.releases import Absence, Difference, EngineRelease, Recipe
from harness.errors import EnvironmentFault
from tests.wheel_index import Index

OFFICIAL = {
    "toy/__init__.py": "",
    "toy/version.py": "commit = 'abc'\n",
    "toy/engine.py": "def step(): ...\n",
    "toy/cuda/__init__.py": "",
    "toy/cuda/kernels.py": "FAST = True\n",
    "toy/data.json": "{}\n",
}
REBUILT_VERSION = "commit = None\n"
REBUILT = {name: text for name, text in OFFICIAL.items() if "cuda" not in name} | {
    "toy/version.py": REBUILT_VERSION,
    "toy/native.so": "not ours to judge\n",
}
RECIPE = Recipe(
    official="toy",
    differences=(Difference("toy/version.py", hashlib.sha256(REBUILT_VERSION.encode()).hexdigest(), "build time"),),
    absences=(Absence("toy/cuda/", "CUDA only"),),
)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the pip that `python -m venv` gives every engine environment."""
    folder = tmp_path_factory.mktemp("engine") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


@pytest.fixture
def install(index: Index, tmp_path: Path, python: Path) -> Callable[..., EngineEnvironment]:
    """Return a function that puts a rebuild's files where an installer would."""
    index.add("toy", "1.0", OFFICIAL)

    def install(files: dict[str, str] = REBUILT, name: str = "toy-cpu") -> EngineEnvironment:
        site = tmp_path / "environment" / "site-packages"
        elsewhere = Index(tmp_path / "elsewhere")
        with zipfile.ZipFile(elsewhere.add(name, "1.0", files)) as wheel:
            wheel.extractall(site)
        return EngineEnvironment(python, EngineRelease(name, "1.0"), {}, site.parent, site)

    return install


def test_a_rebuild_that_differs_as_listed_is_verified(install: Callable[..., EngineEnvironment]) -> None:
    seen = verify(install(), recipe=RECIPE)
    assert seen.outcome is Outcome.VERIFIED, seen
    assert (seen.compared, seen.identical) == (5, 2)
    assert seen.expected == {"toy/version.py": "build time", "toy/cuda/": "CUDA only"}
    assert (seen.differing, seen.missing, seen.extra, seen.edited, seen.reason) == ((), (), (), (), "")
    assert seen.official == "toy==1.0"
    assert seen.source == "toy-1.0-py3-none-any.whl, a local file"


def test_the_official_distribution_needs_no_recipe(install: Callable[..., EngineEnvironment]) -> None:
    assert verify(install(OFFICIAL, "toy"), recipe=Recipe()).outcome is Outcome.VERIFIED


@pytest.mark.parametrize(
    ("change", "field", "name"),
    [
        ({"toy/engine.py": "def step(): pass\n"}, "differing", "toy/engine.py"),
        ({"toy/version.py": "commit = 'sly'\n"}, "differing", "toy/version.py"),
        ({"toy/cuda/kernels.py": "FAST = False\n"}, "differing", "toy/cuda/kernels.py"),
        ({"toy/engine.py": None}, "missing", "toy/engine.py"),
        ({"toy/added.py": ""}, "extra", "toy/added.py"),
        ({"toy_patches.py": ""}, "extra", "toy_patches.py"),
    ],
    ids=["altered", "listed, but other content", "in a listed folder", "missing", "added", "added beside"],
)
def test_a_rebuild_that_differs_in_any_other_way_is_named(
    install: Callable[..., EngineEnvironment], change: dict[str, str | None], field: str, name: str
) -> None:
    files = {file: text for file, text in (REBUILT | change).items() if text is not None}
    seen = verify(install(files), recipe=RECIPE)
    assert seen.outcome is Outcome.DIFFERS
    assert getattr(seen, field) == (name,)
    assert name in seen.reason
    others = {"differing", "missing", "extra", "edited"} - {field}
    assert all(getattr(seen, other) == () for other in others)


@pytest.mark.parametrize("name", ["toy/engine.py", "toy/data.json", "toy/native.so"])
@pytest.mark.parametrize("how", ["changed", "removed"])
def test_a_file_touched_after_installation_is_named(
    install: Callable[..., EngineEnvironment], name: str, how: str
) -> None:
    environment = install()
    assert verify(environment, recipe=RECIPE).outcome is Outcome.VERIFIED
    file = environment.site_packages / name
    file.write_text("touched") if how == "changed" else file.unlink()
    seen = verify(environment, recipe=RECIPE)  # the official hashes are cached by now; the files must be read anew
    assert seen.outcome is Outcome.DIFFERS
    assert seen.edited == (name,)


def test_a_file_dropped_into_the_package_after_installation_is_named(install: Callable[..., EngineEnvironment]) -> None:
    environment = install()
    (environment.site_packages / "toy" / "dropped.py").touch()
    assert verify(environment, recipe=RECIPE).extra == ("toy/dropped.py",)


def test_without_an_index_nothing_is_verified(index: Index, install: Callable[..., EngineEnvironment]) -> None:
    environment = install()
    for wheel in index.folder.iterdir():
        wheel.unlink()
    seen = verify(environment, recipe=RECIPE)
    assert seen.outcome is Outcome.UNVERIFIED
    assert "toy==1.0" in seen.reason
    assert (seen.compared, seen.identical) == (0, 0)

    (environment.site_packages / "toy" / "engine.py").write_text("touched")
    assert verify(environment, recipe=RECIPE).outcome is Outcome.DIFFERS, "what is seen without an index still counts"


def test_once_read_the_official_hashes_need_no_index(index: Index, install: Callable[..., EngineEnvironment]) -> None:
    environment = install()
    first = verify(environment, recipe=RECIPE)
    for wheel in index.folder.iterdir():
        wheel.unlink()
    assert verify(environment, recipe=RECIPE) == first

    (environment.folder / CACHE).write_text("{}")
    assert verify(environment, recipe=RECIPE).outcome is Outcome.UNVERIFIED


@pytest.mark.parametrize("fault", ["truncated", "no RECORD", "no Python file", "no hash"])
def test_an_official_wheel_that_cannot_be_read_verifies_nothing(
    index: Index, install: Callable[..., EngineEnvironment], fault: str
) -> None:
    environment = install()
    if fault == "no Python file":
        wheel = index.add("toy", "1.0", {"toy/data.json": "{}"})
    else:
        wheel = index.add("toy", "1.0", OFFICIAL, record=fault != "no RECORD")
    if fault == "truncated":
        wheel.write_bytes(wheel.read_bytes()[:-40])
    if fault == "no hash":
        with zipfile.ZipFile(wheel) as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        record = "toy-1.0.dist-info/RECORD"
        content[record] = re.sub(rb"(toy/engine\.py),sha256=[^,]*", rb"\1,", content[record])
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    assert verify(environment, recipe=RECIPE).outcome is Outcome.UNVERIFIED
    assert not (environment.folder / CACHE).exists()


def test_a_wheel_cut_short_is_no_wheel(index: Index) -> None:
    whole = index.add("toy", "1.0", OFFICIAL).read_bytes()
    assert len(_python_files(io.BytesIO(whole))) == 5
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(zipfile.BadZipFile):
            _python_files(io.BytesIO(whole[:length]))


def test_a_distribution_that_is_not_there_is_a_fault(install: Callable[..., EngineEnvironment]) -> None:
    environment = dataclasses.replace(install(), release=EngineRelease("other", "1.0"))
    with pytest.raises(EnvironmentFault, match="other is not installed"):
        verify(environment, recipe=RECIPE)


class Server(http.server.ThreadingHTTPServer):
    """An index on this machine. `ranges` says whether it serves ranges, `requested` which it served."""

    ranges = True

    def __init__(self, index: Index) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.index = index
        self.requested: list[str] = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path.startswith("/simple/"):
            links = "".join(f'<a href="/{wheel.name}">{wheel.name}</a>' for wheel in self.server.index.folder.iterdir())
            content = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
            kind = "text/html"
        else:
            content = (self.server.index.folder / self.path[1:]).read_bytes()
            kind = "application/zip"
        asked = self.headers.get("Range")
        self.send_response(206 if asked and self.server.ranges else 200)
        if asked and self.server.ranges:
            self.server.requested.append(asked)
            first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            content = content[first : last + 1]
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(index: Index, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(index)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("ranges", "how"), [(True, "by range requests"), (False, "downloaded")])
def test_the_wheel_of_a_server_is_read_in_part_if_it_can_be(
    install: Callable[..., EngineEnvironment], server: Server, ranges: bool, how: str
) -> None:
    server.ranges = ranges
    environment = install()
    seen = verify(environment, recipe=RECIPE)
    assert seen.outcome is Outcome.VERIFIED, seen.reason
    assert seen.source == f"toy-1.0-py3-none-any.whl, {how}"
    assert bool(server.requested) is ranges
    assert not list(environment.folder.rglob("*.whl")), "no copy of the wheel is kept"
