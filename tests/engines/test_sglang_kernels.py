"""Which kernels an installed SGLang is found to want, on trees that hold one thing each."""

from __future__ import annotations

import re

import pytest

from harness.engines.sglang_kernels import FOLDER, missing
from harness.errors import EnvironmentFault

BACKEND = "srt/layers/attention/intel_amx_backend.py"
WORKER = "srt/speculative/eagle_worker_v2.py"
MODEL = "srt/models/llama_eagle3.py"
# Reached: worker -> kernels.ops.tree -> (by a relative import) kernels.ops.far
TREE = "kernels/ops/tree.py"
FAR = "kernels/ops/far.py"
# Not reached.
OTHER = "srt/models/mixtral.py"

SGLANG = {
    "srt/models/llama.py": "",
    MODEL: "from sglang.srt.models.llama import LlamaModel\n",
    BACKEND: """
import torch
class Backend:
    def __init__(self):
        self.decode_attention_fwd = torch.ops.sgl_kernel.decode_attention_cpu
    def forward(self, a):
        self.decode_attention_fwd(a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a)
""",
    WORKER: "from sglang.kernels.ops import (  # a name that is a module\n    tree as trees,\n)\n",
    TREE: """
from sglang.srt.utils import is_cpu, is_cuda
from .far import something
_is_cpu, _is_cuda = None, is_cuda()
_is_cpu = is_cpu()
if _is_cpu:
    from sgl_kernel import fill_bonus_tokens_cpu as fill
def tokens(a):
    if _is_cpu:
        return fill(a, a, a, accept_stride=2)
""",
    FAR: "",
    OTHER: "from sgl_kernel import experts_cpu\n",
    "kernels/__init__.py": "",
    "srt/utils.py": "",
}


@pytest.fixture
def install(tmp_path):
    """Return a function that lays out SGLANG, with code added to one file, and returns site-packages."""

    def lay_out(file=None, code=""):
        for name, text in SGLANG.items():
            path = tmp_path / "sglang" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + (code if name == file else ""))
        return tmp_path

    return lay_out


def test_nothing_is_missing(install):
    assert missing(install()) == {}


def test_what_is_wanted_is_found_with_its_place(install, tmp_path):
    (tmp_path / "none" / "sgl_kernel").mkdir(parents=True)
    (tmp_path / "none" / "sgl_kernel" / "__init__.py").write_text("__all__ = []\n")
    assert missing(install(), tmp_path / "none") == {
        "decode_attention_cpu": f"sglang/{BACKEND}:5",
        "fill_bonus_tokens_cpu": f"sglang/{TREE}:7",
    }


WANTED = {
    "imported with the module": (FAR, "from sgl_kernel import new"),
    "imported with the module, far down": (FAR, "class A:\n  if not is_cuda():\n    from sgl_kernel import new"),
    "imported from a module of the package": (FAR, "from sgl_kernel.part import new"),
    "a module of the package": (FAR, "import sgl_kernel.new"),
    "looked up with the module": (FAR, "import torch\nnew = torch.ops.sgl_kernel.new"),
    "only for CPUs": (FAR, "from sglang.srt.utils import is_cpu\nif is_cpu():\n  from sgl_kernel import new"),
    "the failure is told in other words": (
        FAR,
        "try:\n  from sgl_kernel import new\nexcept ImportError as error:\n  raise ImportError('no new') from error",
    ),
    "another failure is caught": (FAR, "try:\n  from sgl_kernel import new\nexcept KeyError:\n  pass"),
    "nothing is caught": (FAR, "try:\n  pass\nfinally:\n  from sgl_kernel import new"),
    "beside other devices": (FAR, "if is_cuda():\n  from sgl_kernel import x\nelse:\n  from sgl_kernel import new"),
    "after other devices": (
        FAR,
        "def f():\n  if _is_cuda:\n    return\n  if is_cpu():\n    torch.ops.sgl_kernel.new_cpu()",
    ),
    "called by a root": (BACKEND, "def f():\n  return torch.ops.sgl_kernel.new_cpu(1)"),
    "called by a root, in a loop": (
        WORKER,
        "def f():\n  for _ in a:\n    with b:\n      torch.ops.sgl_kernel.new_cpu(1)",
    ),
    "called next to a root": (TREE, "async def f():\n  from sgl_kernel import new_cpu"),
    "called on a CPU, anywhere": (
        FAR,
        "def f():\n  if _is_cpu and g:\n    pass\n  elif _is_cpu:\n    torch.ops.sgl_kernel.new_cpu()",
    ),
    "called where others are imported": (
        FAR,
        "from sgl_kernel import verify_tree_greedy_cpu\ndef f():\n  torch.ops.sgl_kernel.new_cpu()",
    ),
}


@pytest.mark.parametrize(("file", "code"), WANTED.values(), ids=WANTED)
def test_a_new_kernel_is_named(install, file, code):
    (name,) = missing(install(file, code))
    assert name in {"new", "new_cpu", "part.new"}


NOT_WANTED = {
    "a module that is not reached": (OTHER, "from sgl_kernel import new"),
    "another device": (FAR, "if is_cuda():\n  from sgl_kernel import new"),
    "another device's flag": (TREE, "if _is_cuda:\n  from sgl_kernel import new_cpu"),
    "AMX": (TREE, "_amx = cpu_has_amx_support()\nif _is_cpu and _amx:\n  from sgl_kernel import new_cpu"),
    "AMX, asked of a layer": (
        BACKEND,
        "def f():\n  if use_intel_amx_backend(layer):\n    torch.ops.sgl_kernel.new_cpu()",
    ),
    "AMX, in an expression": (BACKEND, "def f():\n  return torch.ops.sgl_kernel.new_cpu() if _is_cuda else 0"),
    "never reached on a CPU": (TREE, "def f():\n  if _is_cpu:\n    return 0\n  from sgl_kernel import new_cpu"),
    "either way it ends": (
        TREE,
        "def f():\n  if g:\n    return\n  else:\n    raise E\n  from sgl_kernel import new_cpu",
    ),
    "types only": (FAR, "if TYPE_CHECKING:\n  from sgl_kernel import new"),
    "done without": (FAR, "try:\n  from sgl_kernel import new\nexcept ImportError:\n  new = None"),
    "done without, one of several": (FAR, "try:\n  from sgl_kernel import new\nexcept (OSError, ImportError):\n  pass"),
    "asked for first": (
        BACKEND,
        "def f():\n  if hasattr(torch.ops.sgl_kernel, 'new_cpu'):\n    torch.ops.sgl_kernel.new_cpu()",
    ),
    "called for other models": (FAR, "def f():\n  torch.ops.sgl_kernel.new_cpu()"),
    "called for other devices": (BACKEND, "def f():\n  torch.ops.sgl_kernel.new()"),
    "another package": (FAR, "from sgl_kernel_npu import new\nfrom .sgl_kernel import new"),
}


@pytest.mark.parametrize(("file", "code"), NOT_WANTED.values(), ids=NOT_WANTED)
def test_what_a_cpu_does_not_reach_is_not_wanted(install, file, code):
    assert missing(install(file, code)) == {}


MISFITS = {
    "one too few": (BACKEND, "def g(f, a):\n  f.decode_attention_fwd(a, a)", "with 2 arguments, .* takes 19"),
    "under another name": (TREE, "fill(1, 2, 3, 4, 5)", "with 5 arguments, .* takes 4"),
    "a new keyword": (TREE, "fill(1, 2, 3, stride=4)", "with stride, which"),
    "a keyword twice": (TREE, "fill(1, 2, 3, accept_lens=4)", "with accept_lens, which"),
}


@pytest.mark.parametrize(("file", "code", "says"), MISFITS.values(), ids=MISFITS)
def test_a_call_that_does_not_fit_is_named(install, file, code, says):
    ((name, where),) = missing(install(file, code)).items()
    assert name in {"decode_attention_cpu", "fill_bonus_tokens_cpu"}
    assert where.startswith(f"sglang/{file}:")
    assert re.search(says, where)


def test_where_nothing_can_be_said_is_a_fault(install, tmp_path):
    with pytest.raises(EnvironmentFault, match=r"has no sglang\.srt"):
        missing(tmp_path)
    site_packages = install(MODEL, "if :\n  torch.ops.sgl_kernel.new_cpu()")
    with pytest.raises(EnvironmentFault, match=r"llama_eagle3\.py cannot be parsed"):
        missing(site_packages)
    site_packages = install()
    for name in (BACKEND, TREE):
        (site_packages / "sglang" / name).write_text("")
    with pytest.raises(EnvironmentFault, match=r"nothing in .* calls a kernel"):
        missing(site_packages)
    (site_packages / "sglang" / WORKER).unlink()
    with pytest.raises(EnvironmentFault, match="eagle_worker_v2") as fault:
        missing(site_packages)
    assert "0.5.20 to 0.5.23" in fault.value.remedy


def test_the_folder_holds_the_package_and_nothing_else():
    assert [path.name for path in FOLDER.iterdir() if path.name != "__pycache__"] == ["sgl_kernel"]
