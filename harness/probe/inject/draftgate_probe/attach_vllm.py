"""Attach the probe to vLLM, through its entry-point group `vllm.general_plugins` (vllm/plugins/__init__.py).

Seams, read in 0.28.0 and 0.32.0: `BaseModelLoader.load_model` (vllm/model_executor/model_loader/base_loader.py), the
runners' `execute_model` and the proposers' `propose`. Classes of models are never named.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from .config import ConfigReads
from .journal import Journal
from .loading import LoadRecorder
from .serving import ServingRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_RUNNERS = "vllm.v1.worker."
_PROPOSERS = ("vllm.v1.spec_decode.", "vllm.v1.worker.gpu.spec_decode.")
_FEATURES = ("aux_hidden_states", "target_hidden_states", "last_hidden_states")
"""Names of the proposers' argument that carries the target's features, the first that is there and not None.

V1: `target_hidden_states` (v1/spec_decode/llm_base_proposer.py, eagle.py up to 0.28); V2: `aux_hidden_states`, or
`last_hidden_states` for drafters without auxiliary layers (v1/worker/gpu/spec_decode/*/speculator.py)."""


def register() -> None:
    """Entry point: called by vLLM once in every process it starts."""
    import vllm  # noqa: PLC0415 -- this module is imported only by vLLM's plugin loader

    journal = Journal.from_environment("vllm", vllm.__version__)
    if journal is not None:
        _Attachment(journal).install()


def _subclasses(cls: type) -> Iterator[type]:
    yield cls
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield from _subclasses(child)


def _place() -> dict[str, int]:
    """Return where this process stands, from vllm/distributed/parallel_state.py."""
    import torch.distributed as dist  # noqa: PLC0415 -- needed in workers alone
    from vllm.distributed import parallel_state  # noqa: PLC0415 -- as above

    grouped = dist.is_available() and dist.is_initialized()
    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    try:
        dp_rank = int(parallel_state.get_dp_group().rank_in_group)
    except AssertionError:  # no data-parallel group in this release or process
        dp_rank = 0
    return {
        "rank": dist.get_rank() if grouped else 0,
        "world_size": dist.get_world_size() if grouped else 1,
        "tp_rank": tp.rank_in_group,
        "tp_size": tp.world_size,
        "pp_rank": pp.rank_in_group,
        "pp_size": pp.world_size,
        "dp_rank": dp_rank,
    }


class _Attachment:
    """What is hooked in this process, and how to unhook it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._config: ConfigReads | None = None
        self._undo: list[Callable[[], None]] = []
        self._models: dict[str, Any] = {}
        self._loads: dict[str, dict[str, Any]] = {}
        self._number = 0
        self._requested: list[int] | None = None
        self._serving: ServingRecorder | None = None
        self._depth = 0

    def install(self) -> None:
        """Put in place what can be before a model is loaded; the rest follows once both models are."""
        self._journal.attach("config reads", self._watch_config)
        self._journal.attach("draft model config", self._claim_config)
        self._journal.attach("model loaders", self._hook_loaders)
        self._journal.write_process()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        if self._config is not None:
            self._config.forked()
        self._journal.guard("after a fork", self._journal.write_process)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        old = owner.__dict__[name]
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old))

    def _watch_config(self) -> None:
        from transformers import PretrainedConfig  # noqa: PLC0415 -- vLLM has imported it by now

        self._config = ConfigReads(self._journal, PretrainedConfig)
        self._config.install()

    def _claim_config(self) -> None:
        """Claim the draft model's config object as SpeculativeConfig leaves it, wrapped and copied."""
        from vllm.config import SpeculativeConfig  # noqa: PLC0415 -- vLLM has imported it by now

        original = SpeculativeConfig.__post_init__

        @functools.wraps(original)
        def post_init(config: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(config, *args, **kwargs)
            self._journal.guard("claiming the drafter's config", lambda: self._claim(config.draft_model_config))
            return result

        self._replace(SpeculativeConfig, "__post_init__", post_init)

    def _claim(self, model_config: Any) -> None:
        if self._config is not None and model_config is not None:
            for name in ("hf_config", "hf_text_config"):
                self._config.claim(getattr(model_config, name, None))

    def _hook_loaders(self) -> None:
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # noqa: PLC0415 -- heavy

        for cls in _subclasses(BaseModelLoader):
            if "load_model" in cls.__dict__:
                self._replace(cls, "load_model", self._wrap_load_model(cls.__dict__["load_model"]))

    def _wrap_load_model(self, original: Any) -> Any:
        @functools.wraps(original)
        def load_model(loader: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
            if "load_weights" in vars(loader):  # a subclass's load_model that calls its parent's
                return original(loader, vllm_config, model_config, *args, **kwargs)
            role = self._role(vllm_config, model_config)
            if role == "drafter":
                self._journal.guard("claiming the drafter's config", lambda: self._claim(model_config))
            inner = loader.load_weights
            loader.load_weights = lambda model, config: self._load_weights(inner, role, model, config)
            try:
                model = original(loader, vllm_config, model_config, *args, **kwargs)
            finally:
                del loader.load_weights
            self._journal.guard("after loading", lambda: self._loaded(role, model))
            return model

        return load_model

    def _role(self, vllm_config: Any, model_config: Any) -> str:
        draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
        if model_config is draft or getattr(model_config, "runner", "") == "draft":
            return "drafter"
        if self._config is not None and self._config.is_drafter(model_config.model):
            return "drafter"
        return "target"

    def _load_weights(self, inner: Any, role: str, model: Any, model_config: Any) -> Any:
        try:
            recorder = LoadRecorder(model, str(model_config.model), self._journal.fault)
        except Exception as error:  # noqa: BLE001 -- the engine must load its weights whatever we do
            self._journal.fault(f"recording the {role}'s load", error)
            return inner(model, model_config)
        try:
            with recorder:
                return inner(model, model_config)
        finally:
            where = f"the {role}'s load"
            self._journal.guard(where, lambda: self._write_load(role, recorder, model, model_config, inner))

    def _write_load(self, role: str, recorder: LoadRecorder, model: Any, model_config: Any, inner: Any) -> None:
        facts = {
            "role": role,
            "place": _place(),
            "path": str(model_config.model),
            "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
            "loader": type(getattr(inner, "__self__", inner)).__name__,
            **recorder.facts(),
        }
        self._loads[role] = facts
        self._number += 1
        self._journal.write(f"load-{role}", facts, suffix=f"-{self._number}")

    def _loaded(self, role: str, model: Any) -> None:
        self._models[role] = model
        if role == "target":
            self._watch_setter(model)
        if self._serving is None and {"target", "drafter"} <= set(self._models):
            self._serve()

    def _watch_setter(self, target: Any) -> None:
        """Note what the engine asks the target to hand over: `set_aux_hidden_state_layers` (models/interfaces.py)."""
        original = getattr(target, "set_aux_hidden_state_layers", None)
        if original is None:
            return

        def setter(layers: Any) -> Any:
            self._requested = [int(layer) for layer in layers]
            return original(layers)

        target.set_aux_hidden_state_layers = setter
        self._undo.append(lambda: vars(target).pop("set_aux_hidden_state_layers", None))

    def _serve(self) -> None:
        target, drafter = self._models["target"], self._models["drafter"]
        serving = ServingRecorder(
            target, drafter, self._loads["drafter"], self._save_serving, self._done, self._journal.fault
        )
        serving.declared = lambda: next(
            (
                [int(layer) for layer in module.aux_hidden_state_layers]
                for module in target.modules()
                if getattr(module, "aux_hidden_state_layers", None)
            ),
            None,
        )
        self._serving = serving
        hooked = {"execute_model": 0, "propose": 0}
        for cls in self._engine_classes():
            if "execute_model" in cls.__dict__ and cls.__module__.startswith(_RUNNERS) and hasattr(cls, "load_model"):
                self._replace(cls, "execute_model", self._wrap_step(cls.__dict__["execute_model"]))
                hooked["execute_model"] += 1
            if "propose" in cls.__dict__ and hasattr(cls, "load_model"):
                self._replace(cls, "propose", self._wrap_propose(cls.__dict__["propose"]))
                hooked["propose"] += 1
        for name, count in hooked.items():
            if not count:
                raise LookupError(
                    f"no class with `{name}` among vLLM's {'runners' if name != 'propose' else 'proposers'}"
                )
        self._save_serving(serving.facts())

    def _engine_classes(self) -> list[type]:
        """Return the classes of the runners and proposers of every module that is imported in this process."""
        found: dict[int, type] = {}
        modules: list[tuple[str, Any]] = list(sys.modules.items())
        for name, module in modules:
            if name.startswith((_RUNNERS, *_PROPOSERS)) and module is not None:
                names: dict[str, Any] = vars(module)
                classes = [item for item in names.values() if isinstance(item, type)]
                found |= {id(cls): cls for cls in classes if cls.__module__.startswith((_RUNNERS, *_PROPOSERS))}
        return list(found.values())

    def _wrap_step(self, original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            serving = self._serving
            if serving is not None and getattr(runner, "model", None) is not None:

                def begin() -> None:
                    given = signature.bind(runner, *args, **kwargs).arguments
                    dummy = bool(given.get("dummy_run") or given.get("is_profile"))
                    tokens = getattr(given.get("scheduler_output"), "total_num_scheduled_tokens", 0)
                    serving.runner = f"{type(runner).__module__}.{type(runner).__qualname__}"
                    serving.requested = self._requested
                    serving.step_begins(real=not dummy and tokens > 0)

                self._journal.guard("before a step", begin)
            return original(runner, *args, **kwargs)

        return execute_model

    def _wrap_propose(self, original: Any) -> Any:
        signature = inspect.signature(original)
        if not set(_FEATURES) & set(signature.parameters):
            return original  # `*args`: it passes the features on to one that names them

        @functools.wraps(original)
        def propose(proposer: Any, *args: Any, **kwargs: Any) -> Any:
            serving = self._serving
            if serving is None or self._depth:
                return original(proposer, *args, **kwargs)

            def begin() -> None:
                given = signature.bind(proposer, *args, **kwargs).arguments
                value: Any = next((given[name] for name in _FEATURES if given.get(name) is not None), [])
                serving.proposer = f"{type(proposer).__module__}.{type(proposer).__qualname__}"
                dummy = bool(given.get("dummy_run") or given.get("is_profile"))
                serving.propose_begins(list(value) if isinstance(value, (list, tuple)) else [value], real=not dummy)

            self._journal.guard("before a proposal", begin)
            self._depth += 1
            try:
                return original(proposer, *args, **kwargs)
            finally:
                self._depth -= 1
                self._journal.guard("after a proposal", serving.propose_ends)

        return propose

    def _save_serving(self, facts: dict[str, Any]) -> None:
        self._journal.write("serving", {"place": _place(), **facts})

    def _done(self) -> None:
        """Everything is known: unhook, so that the rest of the run costs nothing."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._serving = None
        self._models.clear()
        if self._config is not None:
            self._config.remove()
        (self._journal.folder / f"complete-{os.getpid()}").touch()
