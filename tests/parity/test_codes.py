"""The codes in docs/parity.md are the codes that the package emits, and every one of them is produced by a test."""

import re
from pathlib import Path

import harness.parity

CODE = re.compile(r"\bPAR\d{3}\b")
PACKAGE = Path(harness.parity.__file__).parent
ROOT = PACKAGE.parent.parent


def codes(*files):
    return {code for file in files for code in CODE.findall(file.read_text())}


def test_every_code_is_documented_and_every_documented_code_exists():
    table = {line.split("|")[1].strip() for line in (ROOT / "docs/parity.md").read_text().splitlines() if "|" in line}
    emitted = codes(*PACKAGE.glob("*.py"))
    assert emitted
    assert emitted == {cell for cell in table if CODE.fullmatch(cell)}


def test_every_code_is_produced_by_a_test():
    tests = [file for file in Path(__file__).parent.glob("test_*.py") if file != Path(__file__)]
    assert codes(*PACKAGE.glob("*.py")) == codes(*tests)
