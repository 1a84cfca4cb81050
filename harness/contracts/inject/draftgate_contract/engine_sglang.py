"""SGLang in one process without a server: the state its layers want, and a drafter's class built from its config.

Read in 0.4.6.post5 to 0.5.23. Names that a release lacks are left out, never guessed: what is then missing raises.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import socket
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import excerpt, processor, stubs

if TYPE_CHECKING:
    from collections.abc import Iterator

STUBBED = ("sgl_kernel", "flashinfer", "torchvision")
"""Compiled for CUDA, or (torchvision) against another build of torch."""

BLOCKED = ("vllm", "deep_gemm")
"""Never to be taken for the release's own: old releases import layers from vLLM where it is installed."""

_MODELS = "sglang.srt.models"
_DEVICE_CHECKS = ("is_", "get_device")
"""Cached functions of sglang.srt.utils that must forget what they saw while a GPU was pretended."""


class SGLang:
    """One release. `pretend_gpu` imports it as a machine with a GPU would."""

    name = "sglang"

    def __init__(self, *, pretend_gpu: bool) -> None:
        self._classes: dict[str, tuple[str, str]] = {}
        stubs.Finder(STUBBED, BLOCKED).install()
        os.environ["SGLANG_USE_CPU_ENGINE"] = "0" if pretend_gpu else "1"
        with _tolerant_registration(), _gpu_pretended() if pretend_gpu else contextlib.nullcontext():
            importlib.import_module("sglang.srt.configs.model_config")
            self.version = str(importlib.import_module("sglang").__version__)
            self._classes = _entry_classes()
            importlib.import_module(self._classes["LlamaForCausalLMEagle3"][0])
            importlib.import_module("sglang.srt.models.llama")
        _forget_device_checks()
        _start_process_state()

    def architectures(self) -> dict[str, str]:
        """Return architecture -> module.Class of every class whose name says that it is an EAGLE drafter."""
        return {
            name: f"{module}.{name}" for name, (module, _) in sorted(self._classes.items()) if "eagle" in name.lower()
        }

    def files(self) -> list[str]:
        """Return the source files of the EAGLE-3 classes, relative to the site folder."""
        root = Path(sys.modules["sglang"].__file__ or "").parents[1]
        names = [name for name in self._classes if "Eagle3" in name]
        return sorted({str(Path(self._classes[name][1]).relative_to(root)) for name in names})

    def build(self, drafter: str, target: str) -> tuple[Any, list[Any]]:
        """See trial.Engine. The config goes through the release's own ModelConfig, as the draft worker's does."""
        del target  # a drafter of SGLang is built from its own config alone
        config = _model_config(drafter, is_draft_model=True).hf_config
        name = config.architectures[0]
        if name not in self._classes:
            raise LookupError(f"{name} is none of this release's model classes")
        module = importlib.import_module(self._classes[name][0])
        with _default_dtype(torch.bfloat16):
            return getattr(module, name)(config=config, quant_config=None), [config]

    def configured(self, drafter: str, target: str) -> dict[str, Any]:
        """Return the layer ids that the target's model runner reads from a drafter's config: None for none.

        It is a statement within the runner's construction: `try: ... except: ids = None`, from 0.5.1 on.
        """
        del target
        folder = Path(sys.modules["sglang"].__file__ or "").parent / "srt" / "model_executor"
        found = [(file, node) for file, node in excerpt.nodes(folder, ast.Try) if excerpt.spelling(node, excerpt.IDS)]
        if not found and self._spelled(excerpt.IDS):
            raise LookupError(f"{excerpt.IDS} is not read where it was looked for")
        if not found:
            return {"": None}
        file, node = min(found, key=lambda pair: pair[1].end_lineno - pair[1].lineno)
        holder = excerpt.of_attributes()
        config = _model_config(drafter, is_draft_model=True)
        names = excerpt.run(node, file, {"draft_model_config": config, "self": holder, "config": holder})
        return {"": getattr(holder, excerpt.IDS) if hasattr(holder, excerpt.IDS) else names[excerpt.IDS]}

    def _spelled(self, word: str) -> bool:
        folder = Path(sys.modules["sglang"].__file__ or "").parent / "srt"
        return any(word in file.read_text(encoding="utf-8", errors="replace") for file in folder.rglob("*.py"))

    def capture(self, target: str, ids: list[int] | None) -> list[int] | None:
        """Return the layers that the target captures when it is asked for `ids`; None if it cannot be asked."""
        config = _model_config(target, is_draft_model=False).hf_config
        module = importlib.import_module("sglang.srt.models.llama")
        with _default_dtype(torch.bfloat16):
            model = module.LlamaForCausalLM(config=config, quant_config=None)
        if ids is not None and not inspect.signature(model.set_eagle3_layers_to_capture).parameters:
            return None  # 0.4.6 has its default layers and no others
        model.set_eagle3_layers_to_capture(*([ids] if ids is not None else []))
        return [int(layer) for layer in model.model.layers_to_capture]


def _model_config(folder: str, *, is_draft_model: bool) -> Any:
    from sglang.srt.configs.model_config import ModelConfig  # noqa: PLC0415 -- not before the stand-ins are in place

    known = inspect.signature(ModelConfig.__init__).parameters
    wanted = {"model_path": folder, "is_draft_model": is_draft_model, "dtype": "bfloat16", "trust_remote_code": False}
    wanted["model_override_args"] = "{}"  # 0.4.6 has no default for it
    return ModelConfig(**{name: value for name, value in wanted.items() if name in known})


def _entry_classes() -> dict[str, tuple[str, str]]:
    """Return class name -> (module, file) of the release's model registry, without importing all of it.

    The registry is made of the `EntryClass` of each module in sglang/srt/models (registry.py).
    """
    folder = Path(sys.modules["sglang"].__file__ or "").parent / "srt" / "models"
    found: dict[str, tuple[str, str]] = {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "EntryClass" for t in node.targets):
                value = node.value
                names = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
                listed = [name.id for name in names if isinstance(name, ast.Name)]
                found |= {name: (f"{_MODELS}.{file.stem}", str(file)) for name in listed}
    return found


@contextlib.contextmanager
def _default_dtype(dtype: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_ABSENT = (
    ("_C", "_cuda_getCurrentRawStream"),
    ("triton.runtime.cache", "default_cache_dir"),
    ("triton.runtime.cache", "default_dump_dir"),
    ("triton.runtime.cache", "default_override_dir"),
)
"""What releases import by name and a CPU build of torch, or the shared environment's triton, does not have."""


def _attribute(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


@contextlib.contextmanager
def _tolerant_registration() -> Iterator[None]:
    """Let modules register shape functions of kernels that are not there, and configs that transformers now has.

    Both happen at import, and neither has to do with loading weights. Names of `_ABSENT` become stand-ins.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 -- heavy

    register_fake, register = torch.library.register_fake, CONFIG_MAPPING.register

    def fake(op: Any, func: Any = None, /, **kwargs: Any) -> Any:
        def decorate(function: Any) -> Any:
            try:
                return register_fake(op, function, **kwargs)
            except RuntimeError as error:
                if "does not exist" not in str(error):
                    raise
                return function

        return decorate if func is None else decorate(func)

    torch.library.register_fake = fake
    CONFIG_MAPPING.register = lambda key, value, **_: register(key, value, exist_ok=True)
    for holder, name in _ABSENT:
        if holder.startswith("triton"):
            if importlib.util.find_spec("triton") is None:  # a CPU build of torch may bring none
                continue
            module = importlib.import_module(holder)
        else:
            module = _attribute(torch, holder)
        if not hasattr(module, name):
            setattr(module, name, stubs.make(f"{holder}.{name}"))
    processor.answer()
    try:
        yield
    finally:
        torch.library.register_fake = register_fake
        CONFIG_MAPPING.register = register


@contextlib.contextmanager
def _gpu_pretended() -> Iterator[None]:
    """Make torch say that there is a GPU. Modules decide by it, while imported, which classes GPU users get."""
    properties = types.SimpleNamespace(
        major=9, minor=0, name="NVIDIA H100", multi_processor_count=132, total_memory=80 << 30, warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472, gcnArchName="",
        max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "_is_compiled": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (70 << 30, 80 << 30),
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": stubs.make("torch.cuda.Stream"),
        "Event": stubs.make("torch.cuda.Event"),
        "current_stream": lambda *_: stubs.make("torch.cuda.current_stream"),
    }
    before = {name: vars(torch.cuda)[name] for name in answers}
    version = torch.version.cuda
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = version or "12.8"
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torch.cuda, name, value)
        torch.version.cuda = version


def _forget_device_checks() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.utils") and module is not None:
            for function, value in list(vars(module).items()):
                if hasattr(value, "cache_clear") and function.startswith(_DEVICE_CHECKS):
                    value.cache_clear()


def _start_process_state() -> None:
    """Give this process what a scheduler gives itself before it loads a model, for one rank on gloo."""
    server_args = importlib.import_module("sglang.srt.server_args")
    arguments = _server_args(server_args.ServerArgs)
    _call(server_args, "set_global_server_args_for_scheduler", arguments)
    with contextlib.suppress(ModuleNotFoundError):  # from 0.5.20 on
        context = importlib.import_module("sglang.srt.runtime_context")
        if hasattr(context, "publish"):
            ranks = {}
            if hasattr(context, "SpawnRanks"):
                known = context.SpawnRanks.__struct_fields__
                ranks = {"ranks": context.SpawnRanks(**{name: None if name == "dp_rank" else 0 for name in known})}
            context.publish(arguments, role="scheduler", **ranks)
    parallel = importlib.import_module("sglang.srt.distributed.parallel_state")
    parallel.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{_free_port()}", backend="gloo"
    )
    parallel.initialize_model_parallel(**_known(parallel.initialize_model_parallel, backend="gloo"))
    attention = importlib.import_module("sglang.srt.layers.dp_attention")
    if hasattr(attention, "initialize_dp_attention"):
        offered = {
            "server_args": arguments,
            "model_config": types.SimpleNamespace(hidden_size=160, dtype=torch.bfloat16, hf_config=_Llama),
            "enable_dp_attention": False, "tp_rank": 0, "tp_size": 1, "dp_size": 1, "pp_size": 1,
            "moe_dense_tp_size": None,
        }  # fmt: skip
        attention.initialize_dp_attention(**_known(attention.initialize_dp_attention, **offered))


def _bare(cls: Any) -> Any:
    """Return an object whose constructor has not run."""
    return cls.__new__(cls)


class _Llama:
    """As much of a config as process state asks for."""

    architectures = ("LlamaForCausalLM",)


def _server_args(cls: Any) -> Any:
    """Return the release's server arguments with their defaults; resolving them wants a model and a device."""
    if not dataclasses.is_dataclass(cls):  # from 0.5.20 on a record that construction leaves unresolved
        return cls(model_path="dummy", device="cpu")
    fields = dataclasses.fields(cls)
    arguments = _bare(cls)
    for field in fields:
        value = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        object.__setattr__(arguments, field.name, value)
    for name, value in (("model_path", "dummy"), ("device", "cpu")):
        object.__setattr__(arguments, name, value)
    return arguments


def _known(function: Any, **offered: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}


def _call(module: Any, name: str, *args: Any) -> None:
    function = getattr(module, name, None)
    if function is not None:
        function(*args)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
