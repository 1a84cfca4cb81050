"""Attach the probe to SGLang, through its entry-point group `sglang.srt.plugins` (sglang/srt/plugins, from 0.5.15 on).

Older releases have no such group: there `by_path` calls `register`.

Seams, read in 0.5.23: `load_model` of the loaders and `_initialize_model` (sglang/srt/model_loader/loader.py),
`ModelRunner.forward` (model_executor/model_runner.py), of the target's runner and the drafter's, and
`forward_batch_generation` of the speculative workers (speculative/*_worker*.py). Classes of models are never named.
SGLang's own HookRegistry is not used: it only logs a hook that it could not apply, and it cannot take one off again.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from .classes import family, imported
from .journal import Journal
from .session import Session

_RUNNERS = ("sglang.srt.model_executor.", "sglang.srt.hardware_backend.")
_WORKERS = "sglang.srt.speculative."
_STEPS = ("forward_batch_generation", "forward_batch_speculative_generation")
"""A speculative worker's method that runs one step of the scheduler; the second is its name in 0.5.1."""

_SETTER, _CAPTURED = "set_eagle3_layers_to_capture", "layers_to_capture"
"""The target's method, which is given the ids of the drafter's config or None, and the attribute, in some module of
it, of the layers whose inputs are captured: for most targets each id plus 1 (models/llama.py)."""


def register() -> None:
    """Entry point: called by SGLang once in every process it starts."""
    import sglang  # noqa: PLC0415 -- this module is imported only inside SGLang
    from sglang.version import __version__  # noqa: PLC0415

    journal = Journal.from_environment("sglang", __version__, next(iter(sglang.__path__)))
    if journal is None:
        return
    session = Session(journal, _place)
    session.start(
        {
            "config reads": lambda: _watch_config(session),
            "draft model config": lambda: _claim_config(session),
            "model loaders": lambda: _hook_loaders(session),
        }
    )


def _place() -> dict[str, int]:
    """Return where this process stands, from sglang/srt/distributed/parallel_state.py."""
    import torch.distributed as dist  # noqa: PLC0415 -- needed in workers alone
    from sglang.srt.distributed import parallel_state  # noqa: PLC0415 -- as above

    grouped = dist.is_available() and dist.is_initialized()
    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return {
        "rank": dist.get_rank() if grouped else 0,
        "world_size": dist.get_world_size() if grouped else 1,
        "tp_rank": tp.rank_in_group,
        "tp_size": tp.world_size,
        "pp_rank": pp.rank_in_group,
        "pp_size": pp.world_size,
        "dp_rank": 0,  # replicas are worlds of their own; attention's data parallelism is within the tensor group
    }


def _watch_config(session: Session) -> None:
    from transformers import PretrainedConfig  # noqa: PLC0415 -- SGLang imports it anyway

    session.watch_config(PretrainedConfig)


def _is_drafter(session: Session, model_config: Any) -> bool:
    return bool(getattr(model_config, "is_draft_model", False)) or session.journal.is_drafter(model_config.model_path)


def _claim_config(session: Session) -> None:
    """Claim the draft model's config objects as ModelConfig (sglang/srt/configs/model_config.py) leaves them."""
    from sglang.srt.configs.model_config import ModelConfig  # noqa: PLC0415 -- heavy

    original = ModelConfig.__init__

    @functools.wraps(original)
    def init(model_config: Any, *args: Any, **kwargs: Any) -> None:
        original(model_config, *args, **kwargs)

        def claim() -> None:
            if _is_drafter(session, model_config):
                session.claim(model_config.hf_config, model_config.hf_text_config)

        session.journal.guard("claiming the drafter's config", claim)

    session.replace(ModelConfig, "__init__", init)


class _Loading:
    """One run of a loader. The model does not exist before it: `made` is told of each that the loader makes."""

    def __init__(self, session: Session, role: str, path: str, loader: str) -> None:
        self._session, self._role, self._path, self._loader = session, role, path, loader
        self._recorded = False

    def made(self, model: Any) -> None:
        """Record the model's next `load_weights`."""
        if self._recorded or not hasattr(model, "load_weights"):
            return

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            del model.load_weights
            self._recorded = True
            return self._load(model, lambda: model.load_weights(*args, **kwargs))

        model.load_weights = load_weights

    def _load(self, model: Any, run: Any) -> Any:
        return self._session.load(self._role, model, self._path, self._loader, run)

    def ended(self, model: Any) -> None:
        """Say that the loader has returned this model."""
        vars(model).pop("load_weights", None)
        if not self._recorded:
            self._load(model, lambda: None)
        session = self._session
        if self._role == "target":
            session.watch_setter(model, _SETTER)
        if session.loaded(self._role, model):
            session.serve(_CAPTURED, called=False)
            _hook_serving(session)


def _hook_loaders(session: Session) -> None:
    from sglang.srt.model_loader import loader as module  # noqa: PLC0415 -- heavy

    running: list[_Loading] = []
    for cls in family(module.BaseModelLoader):
        if "load_model" in cls.__dict__:
            session.replace(cls, "load_model", _load_model(session, cls.__dict__["load_model"], running))
    initialize = module._initialize_model  # noqa: SLF001 -- every loader makes its model with it

    @functools.wraps(initialize)
    def initialize_model(*args: Any, **kwargs: Any) -> Any:
        model = initialize(*args, **kwargs)
        if running:
            session.journal.guard("a model that was made", lambda: running[-1].made(model))
        return model

    session.replace(module, "_initialize_model", initialize_model)


def _load_model(session: Session, original: Any, running: list[_Loading]) -> Any:
    @functools.wraps(original)
    def load_model(loader: Any, *args: Any, **kwargs: Any) -> Any:
        if running:  # a subclass's load_model that calls its parent's
            return original(loader, *args, **kwargs)

        def begin() -> None:
            model_config = kwargs["model_config"]  # by keyword only, in every release
            role = "drafter" if _is_drafter(session, model_config) else "target"
            running.append(_Loading(session, role, str(model_config.model_path), type(loader).__name__))

        session.journal.guard("before loading", begin)
        try:
            model = original(loader, *args, **kwargs)
        finally:
            loading = running.pop() if running else None
        if loading is not None:
            session.journal.guard("after loading", lambda: loading.ended(model))
        return model

    return load_model


class _Steps:
    """The step of the scheduler that a speculative worker is running. What runs outside one is warm-up or capture."""

    def __init__(self) -> None:
        self.worker: str | None = None
        self.passing = False


def _hook_serving(session: Session) -> None:
    """Wrap the runners and the speculative workers, whose modules are imported by the time a drafter is loaded."""
    steps = _Steps()
    runners = [cls for cls in imported(*_RUNNERS) if "forward" in cls.__dict__ and hasattr(cls, "load_model")]
    workers = [(cls, name) for cls in imported(_WORKERS) for name in _STEPS if name in cls.__dict__]
    for cls in runners:
        session.replace(cls, "forward", _forward(session, cls.__dict__["forward"], steps))
    for cls, name in workers:
        session.replace(cls, name, _step(cls.__dict__[name], steps))
    if not runners:
        raise LookupError(f"no class with `forward` and `load_model` in SGLang's modules {_RUNNERS[0]}*")
    if not workers:
        raise LookupError(f"no class with `{_STEPS[0]}` in SGLang's modules {_WORKERS}*")


def _step(original: Any, steps: _Steps) -> Any:
    @functools.wraps(original)
    def step(worker: Any, *args: Any, **kwargs: Any) -> Any:
        outer, steps.worker = steps.worker, f"{type(worker).__module__}.{type(worker).__qualname__}"
        try:
            return original(worker, *args, **kwargs)
        finally:
            steps.worker = outer

    return step


def _forward(session: Session, original: Any, steps: _Steps) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if steps.passing:  # a subclass's forward that calls its parent's
            return original(runner, *args, **kwargs)

        def begin() -> None:
            batch = signature.bind(runner, *args, **kwargs).arguments["forward_batch"]
            mode = batch.forward_mode
            real = steps.worker is not None and not mode.is_idle()
            if runner.is_draft_worker:
                # A DECODE pass is on the drafter's own output, one hidden state wide by design.
                hidden = batch.spec_info.hidden_states
                opens = not mode.is_decode()
                session.draft_pass(
                    steps.worker or "", hidden, getattr(batch, "positions", None), opens=opens, real=real
                )
            else:
                decode = mode.is_target_verify()
                session.step(runner, real=real, decode=decode, rows=lambda: (batch.input_ids, batch.positions))

        session.journal.guard("before a forward pass", begin)
        steps.passing = True
        try:
            return original(runner, *args, **kwargs)
        finally:
            steps.passing = False

    return forward
