"""A package index of synthetic wheels, for the real pip and the real uv."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest


class Index:
    """A folder of wheels that pip and uv are pointed at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(
        self,
        name: str,
        version: str,
        files: Mapping[str, str] | None = None,
        requires: Iterable[str] = (),
        *,
        record: bool = True,
    ) -> Path:
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        content = dict(files or {f"{name.replace('-', '_')}/__init__.py": ""}) | {
            f"{info}/METADATA": "\n".join([*metadata, *(f"Requires-Dist: {each}" for each in requires)]) + "\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        rows = [f"{file},sha256={self.hash(text)},{len(text.encode())}" for file, text in content.items()]
        if record:
            content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
        wheel = self.folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for file, text in content.items():
                archive.writestr(file, text)
        return wheel

    @staticmethod
    def hash(text: str) -> str:
        return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def offline_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Return an empty index that is all that pip and uv can see until the test ends."""
    index = Index(tmp_path / "index")
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_ONLY_BINARY", ":all:")
    # uv has no variable for --no-index; offline, with a cache of its own, it has nothing but the folder either.
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_FIND_LINKS", str(index.folder))
    monkeypatch.setenv("UV_NO_BUILD", "1")
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    return index
