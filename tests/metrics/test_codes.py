"""The documents say what the package does: its codes, and what is written of each figure."""

import re
import tomllib
from pathlib import Path

import harness.metrics
from harness.metrics.judge import CONTRACT
from harness.metrics.truth import COUNTS, RATIOS

CODE = re.compile(r"\bMET\d{3}\b")
PACKAGE = Path(harness.metrics.__file__).parent
ROOT = PACKAGE.parent.parent


def test_every_code_is_documented_tested_and_emitted():
    emitted = {code for file in PACKAGE.glob("*.py") for code in CODE.findall(file.read_text())}
    assert emitted == set(CODE.findall((ROOT / "docs/suites.md").read_text()))
    assert emitted == set(CODE.findall(Path(__file__).with_name("test_judge.py").read_text()))


def test_what_is_written_of_each_figure_is_documented_and_is_a_meaning():
    document = (ROOT / "docs/metrics.md").read_text()
    contracts = tomllib.loads(CONTRACT.read_text())["contracts"]
    rows = [figure for contract in contracts for figure in contract["figures"]]
    for figure in rows:
        assert f"| `{figure['name']}` | {figure['meaning']} | {figure.get('beware', '')} |" in document
        scope, formula = figure["meaning"].split(": ", 1)
        assert scope in {"setting", "request", "total", "average", "step", "interval"}
        assert scope == "setting" or formula in {**COUNTS, **RATIOS}
    assert document.count("\n| `") - len(rows) == 6, "a row a figure, and one a scope"
