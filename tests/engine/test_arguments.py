"""Every command line that the shipped pairs make, on CPU and GPU, is one that the engine's own parser accepts."""

import json
import os
import re
import subprocess

import pytest

from harness import pairs
from harness.engines import sglang_kernels
from harness.engines.base import Launch, identify
from harness.engines.sglang import DISTRIBUTIONS as SGLANG
from harness.engines.sglang import SglangAdapter
from harness.engines.vllm import DISTRIBUTIONS as VLLM
from harness.engines.vllm import VllmAdapter

pytestmark = pytest.mark.engine

PARSERS = {
    "vllm": """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
""",
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
""",
}
PARSE = """
import json, sys
for argv in json.load(sys.stdin):
    try:
        parser.parse_args(argv)
    except SystemExit:
        sys.exit("REFUSED " + " ".join(argv))
print("PARSED")
"""


def command_lines(adapter, identity, folder, monkeypatch):
    """Return the arguments of both servers of every shipped pair on both devices, those of GPU pairs included."""
    (folder / "config.json").write_text("{}")
    for variable in re.findall(r"\$\{(\w+)\}", pairs.SHIPPED_FILE.read_text()):
        monkeypatch.setenv(variable, str(folder))
    lines = []
    for pair in pairs.read_file(pairs.SHIPPED_FILE).values():
        assert not pair.unset
        for device in ("cpu", "cuda"):
            for drafter in (folder, None):
                launch = Launch(
                    "x", folder, drafter, pair.method, pair.k, pair.dtype, adapter.default_runner(device), device,
                    tokenizer=pair.canary is None, args=pair.launch(adapter.name).args, version=identity.version,
                )  # fmt: skip
                lines.append(list(adapter.spec(identity, launch).command(30000))[3:])
    return lines


def parse(name, python, lines):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    if name == "sglang":
        env |= {"PYTHONPATH": str(sglang_kernels.FOLDER), "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [python, "-c", PARSERS[name] + PARSE], input=json.dumps(lines), env=env, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "adapter", "distributions"), [
    pytest.param("vllm", VllmAdapter(), VLLM, id="vllm"), pytest.param("sglang", SglangAdapter(), SGLANG, id="sglang"),
])  # fmt: skip
def test_the_engines_parser_accepts_every_command_line(request, tmp_path, monkeypatch, name, adapter, distributions):
    python = request.getfixturevalue(f"{name}_python")
    lines = command_lines(adapter, identify(name, distributions, python), tmp_path, monkeypatch)
    assert len(lines) == 4 * len(pairs.read_file(pairs.SHIPPED_FILE))
    done = parse(name, python, lines)
    assert done.stdout.rstrip().endswith("PARSED"), done.stderr[-2000:]
    refused = parse(name, python, [[*lines[0], "--no-such-flag"]])
    assert "REFUSED" in refused.stderr, f"a parser that accepts all proves nothing: {refused.stderr[-2000:]}"
