"""The codes in docs/judging.md are the codes that the package emits, and every one of them is produced by a test."""

from __future__ import annotations

import re
from pathlib import Path

import harness.measure

CODE = re.compile(r"\b(?:ACC|THR|LOS|CHG)\d{3}\b")
PACKAGE = Path(harness.measure.__file__).parent
ROOT = PACKAGE.parent.parent


def codes(*files: Path) -> set[str]:
    return {code for file in files for code in CODE.findall(file.read_text())}


def test_every_code_is_documented_and_every_documented_code_exists():
    emitted = codes(*PACKAGE.glob("*.py"))
    table = {line.split("|")[1].strip() for line in (ROOT / "docs/judging.md").read_text().splitlines() if "|" in line}
    assert emitted
    assert emitted == {cell for cell in table if CODE.fullmatch(cell)}


def test_every_code_is_produced_by_a_test():
    tests = [file for file in Path(__file__).parent.glob("test_*.py") if file != Path(__file__)]
    # Asserted by its words.
    by_words = {"THR011"}
    assert codes(*PACKAGE.glob("*.py")) - codes(*tests) == by_words
