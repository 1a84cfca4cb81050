"""The command `draftgate compare`: what it prints, its exit statuses, and what it refuses."""

import json
import re

import pytest

from harness import cli
from tests.upgrade.records import measured

SPEC = "small-vllm-v1-spec"


@pytest.fixture
def compare(tmp_path, capsys):
    """Return a function: write two records, compare them, and return status and output."""

    def run(old, new, *options):
        for name, record in (("old", old), ("new", new)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "record.json").write_text(json.dumps(record))
        status = cli.main(["compare", str(tmp_path / "old"), str(tmp_path / "new" / "record.json"), *options])
        return status, capsys.readouterr()

    return run


def test_nothing_is_worse(compare, old, new):
    status, said = compare(old, new)
    assert status == 0
    assert said.out.startswith("draftgate compare: PASS\n\nsmall-vllm-v1: vllm 0.28.0 -> 0.32.0: PASS\n")
    assert "packages: torch: 2.9.0 -> 2.10.0" in said.out


def rename(new):
    metrics = measured(new["cases"][0], "startup")["servers"][SPEC]["surface"]["metrics"]
    metrics["vllm:spec_decode_drafts_total"] = metrics.pop("vllm:spec_decode_num_drafts_total")


def test_what_is_worse_is_named_with_cause_and_remedy(compare, old, new):
    rename(new)
    status, said = compare(old, new)
    assert status == 1
    for text in ("FAIL [UPG050]", "likely cause:", "remedy:", "vllm:spec_decode_num_drafts_total", "worse:"):
        assert text in said.out


def test_json(compare, old, new):
    rename(new)
    status, said = compare(old, new, "--json")
    document = json.loads(said.out)
    assert (status, document["verdict"]) == (1, "FAIL")
    (made,) = document["cases"]
    assert (made["id"], made["old"], made["new"], made["verdict"]) == ("small-vllm-v1", "0.28.0", "0.32.0", "FAIL")
    assert {"topic", "kind", "what", "old", "new"} == set(made["changes"][0])
    assert {"UPG050", "UPG070"} <= {finding["code"] for finding in made["findings"]}


def test_a_long_list_is_cut_and_says_so(compare, old, new):
    packages = new["cases"][0]["engine"]["packages"]
    packages |= {f"package-{number}": "1" for number in range(40)}
    status, said = compare(old, new)
    assert status == 0
    assert "packages: 23 more (--json lists them)" in said.out


def test_text_from_outside_gives_no_orders(compare, old, new):
    rename(new)
    new["cases"][0]["engine"]["packages"]["torch"] = "2\n::error::x\x1b]0;y\x07 ##[error]z"
    metrics = measured(new["cases"][0], "startup")["servers"][SPEC]["surface"]["metrics"]
    metrics["x\n::error::y"] = metrics.pop("vllm:spec_decode_drafts_total")
    _, said = compare(old, new)
    assert "::error::x" in said.out
    assert "\x1b" not in said.out
    assert not re.search(r"^\s*::|##\[", said.out, re.MULTILINE)


def test_missing_evidence_is_status_3(compare, old, new):
    del new["cases"][0]["evidence"]
    status, said = compare(old, new)
    assert status == 3
    assert "the new version's record lacks evidence" in said.out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 99}, "schema 99"),
        ({"complete": False}, "cut short"),
        ({"cases": {}}, "`cases`"),
        ({"cases": [1]}, "`cases`"),
    ],
)
def test_a_record_that_cannot_be_used(compare, old, new, change, text):
    status, said = compare(old, {**new, **change})
    assert status == 2
    assert text in said.err
    assert "record.json" in said.err


def test_no_record(capsys, tmp_path):
    (tmp_path / "x.json").write_text("[]")
    assert cli.main(["compare", str(tmp_path / "gone.json"), str(tmp_path / "x.json")]) == 2
    assert "gone.json" in capsys.readouterr().err
    assert cli.main(["compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
    assert "no run record" in capsys.readouterr().err
