"""The codes in docs/upgrade.md are the codes that the package emits, and every one of them is produced by a test."""

import re
from pathlib import Path

import harness.upgrade

CODE = re.compile(r"\bUPG\d{3}\b")
PACKAGE = Path(harness.upgrade.__file__).parent
ROOT = PACKAGE.parent.parent


def codes(*files: Path) -> set[str]:
    return {code for file in files for code in CODE.findall(file.read_text())}


def test_every_code_is_documented_and_every_documented_code_exists():
    emitted = codes(*PACKAGE.glob("*.py"))
    rows = [line.split("|")[1].strip() for line in (ROOT / "docs/upgrade.md").read_text().splitlines() if "|" in line]
    assert emitted == {cell for cell in rows if CODE.fullmatch(cell)}


def test_every_code_is_produced_by_a_test():
    # Asserted by their words.
    assert codes(*PACKAGE.glob("*.py")) - codes(Path(__file__).with_name("test_compare.py")) == {"UPG060", "UPG061"}
