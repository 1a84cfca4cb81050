"""What is read of metric pages and of the sources of a launch parser."""

import pytest

from harness.engines.surface import Metric, declared_flags, metrics_of
from harness.errors import EvidenceError

PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="x"} 2.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 0.0
# HELP vllm:e2e_seconds How long.
# TYPE vllm:e2e_seconds histogram
vllm:e2e_seconds_bucket{engine="0",le="+Inf"} 1.0
vllm:e2e_seconds_count{engine="0"} 1.0
vllm:e2e_seconds_sum{engine="0"} 1.0
# HELP vllm:never_seen_total A counter that has no sample yet.
# TYPE vllm:never_seen_total counter
"""


def test_metrics_go_by_the_names_that_queries_use():
    found = metrics_of(PAGE)
    assert found["vllm:spec_decode_num_drafts_total"] == Metric(
        "counter", ("engine", "model_name"), "Number of drafts."
    )
    assert found["vllm:num_requests_running"].type == "gauge"
    assert found["vllm:e2e_seconds"] == Metric("histogram", ("engine",), "How long.")
    assert found["vllm:never_seen_total"].type == "counter"


def test_bookkeeping_of_the_exporter_is_no_metric():
    assert not [name for name in metrics_of(PAGE) if name.endswith(("_created", "_bucket", "_count", "_sum"))]


def test_a_page_that_is_none():
    with pytest.raises(EvidenceError, match="/metrics"):
        metrics_of("<html>")


def test_flags_are_read_and_not_run(tmp_path):
    source = tmp_path / "arg_utils.py"
    source.write_text(
        "raise SystemExit\n"
        "class FrontendArgs(BaseFrontendArgs):\n    chat_template: str | None = None\n"
        "class Other:\n    no_flag: int = 0\n"
        'parser.add_argument("--model", "-m", help="--not-this")\n'
        "parser.add_argument(\n    *more, '--dtype')\n"
        'print("--nor-this")\n'
    )
    assert declared_flags([source]) == ("--chat-template", "--dtype", "--model")


@pytest.mark.parametrize("text", [None, "def broken(", "print(1)"])
def test_flags_that_cannot_be_read_are_none(tmp_path, text):
    source = tmp_path / "arg_utils.py"
    if text is not None:
        source.write_text(text)
    with pytest.raises(EvidenceError):
        declared_flags([source])
