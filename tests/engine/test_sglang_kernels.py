"""The reference kernels and the real SGLang: what it wants of them, and trees of drafts that are verified exactly."""

import concurrent.futures
import contextlib
import dataclasses
import shutil

import pytest
import requests

from harness.canary.build import build
from harness.canary.spec import SHIPPED
from harness.engines.base import Launch, identify
from harness.engines.sglang import DISTRIBUTIONS, SglangAdapter
from harness.engines.sglang_kernels import FOLDER, missing
from harness.servers.server import start

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def identity(sglang_python):
    return identify("sglang", DISTRIBUTIONS, sglang_python)


def overlay(site_packages, tmp_path, file, text):
    """Return a folder that looks like `site_packages`, but for `text` at the end of one of SGLang's files."""
    place, here = site_packages / "sglang", tmp_path / "sglang"
    for part in file.split("/"):
        here.mkdir(parents=True)
        for each in place.iterdir():
            if each.name != part:
                (here / each.name).symlink_to(each)
        place, here = place / part, here / part
    shutil.copy(place, here)
    with here.open("a") as changed:
        changed.write(text)
    return tmp_path


def test_the_release_wants_what_is_there_and_nothing_else(identity, tmp_path):
    assert missing(identity.site_packages) == {}
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("__all__ = []\n")
    source = "".join(path.read_text() for path in FOLDER.glob("sgl_kernel/*.py"))
    defined = {line.split("(")[0].removeprefix("def ") for line in source.splitlines() if line.startswith("def ")}
    assert set(missing(identity.site_packages, tmp_path)) == {name for name in defined if not name.startswith("_")}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("srt/layers/attention/intel_amx_backend.py", "\ndef f(q):\n    return torch.ops.sgl_kernel.new_cpu(q)\n"),
        ("kernels/ops/speculative/eagle.py", "\ndef f(q):\n    return torch.ops.sgl_kernel.new_cpu(q)\n"),
        ("srt/mem_cache/allocation.py", "\nif _is_cpu:\n    from sgl_kernel import new_cpu\n"),
        ("srt/layers/sampler.py", "\nfrom sgl_kernel import new_cpu\n"),
    ],
)
def test_a_kernel_that_the_release_gains_is_named(identity, tmp_path, file, text):
    assert list(missing(overlay(identity.site_packages, tmp_path, file, text))) == ["new_cpu"]


def test_trees_are_verified_exactly(identity, tmp_path):
    # The drafter's second choice is "none", which the target never says: a tree accepts what its best chain would.
    pair = build(dataclasses.replace(SHIPPED["small-wrong"], dialect="specforge"), tmp_path / "pair")
    k, tokens = 3, 80
    launch = Launch(
        label="tree",
        target=pair.target,
        drafter=pair.drafter,
        method="eagle3",
        k=k,
        dtype="bfloat16",
        runner="sync",
        device="cpu",
        tokenizer=False,
        args=("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"),
        version=identity.version,
    )
    prompts = [*pair.oracle.prompts(3, 12, seed=1), *pair.oracle.prompts(1, 150, seed=2)]

    def ask(prompt):
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = requests.post(
            f"{server.base_url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=300
        ).json()
        return (
            answer["output_ids"],
            answer["meta_info"]["spec_verify_ct"],
            answer["meta_info"]["spec_num_correct_drafts"],
        )

    def ready(url):
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{url}/health", timeout=30).ok or None

    with (
        start(SglangAdapter().spec(identity, launch), tmp_path, ready) as server,
        concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads,
    ):
        answers = list(threads.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = pair.oracle.acceptance(prompt, tokens, k)
        assert answer == (pair.oracle.continuation(prompt, tokens), expected.drafts, expected.accepted)
