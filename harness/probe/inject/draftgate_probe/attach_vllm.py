"""Attach the probe to vLLM, through its entry-point group `vllm.general_plugins` (vllm/plugins/__init__.py).

Seams, read in 0.28.0 and 0.32.0: `BaseModelLoader.load_model` (vllm/model_executor/model_loader/base_loader.py), the
runners' `execute_model` and the proposers' `propose`. Classes of models are never named.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from .classes import family, imported
from .journal import Journal
from .session import Session

_RUNNERS = "vllm.v1.worker."
_PROPOSERS = ("vllm.v1.spec_decode.", "vllm.v1.worker.gpu.spec_decode.")
_FEATURES = ("aux_hidden_states", "target_hidden_states", "last_hidden_states")
"""Names of the proposers' argument that carries the target's features, the first that is there and not None.

V1: `target_hidden_states` (v1/spec_decode/llm_base_proposer.py, eagle.py up to 0.28); V2: `aux_hidden_states`, or
`last_hidden_states` for drafters without auxiliary layers (v1/worker/gpu/spec_decode/*/speculator.py)."""

_SETTER, _CAPTURED = "set_aux_hidden_state_layers", "aux_hidden_state_layers"
"""The target's method and attribute for auxiliary layers (model_executor/models/interfaces.py)."""


def register() -> None:
    """Entry point: called by vLLM once in every process it starts."""
    import vllm  # noqa: PLC0415 -- this module is imported only by vLLM's plugin loader

    journal = Journal.from_environment("vllm", vllm.__version__, next(iter(vllm.__path__)))
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


def _watch_config(session: Session) -> None:
    from transformers import PretrainedConfig  # noqa: PLC0415 -- vLLM has imported it by now

    session.watch_config(PretrainedConfig)


def _claim(session: Session, model_config: Any) -> None:
    if model_config is not None:
        session.claim(getattr(model_config, "hf_config", None), getattr(model_config, "hf_text_config", None))


def _claim_config(session: Session) -> None:
    """Claim the draft model's config object as SpeculativeConfig (vllm/config/speculative.py) leaves it."""
    from vllm.config import SpeculativeConfig  # noqa: PLC0415 -- vLLM has imported it by now

    original = SpeculativeConfig.__post_init__

    @functools.wraps(original)
    def post_init(config: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(config, *args, **kwargs)
        session.journal.guard("claiming the drafter's config", lambda: _claim(session, config.draft_model_config))
        return result

    session.replace(SpeculativeConfig, "__post_init__", post_init)


def _hook_loaders(session: Session) -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # noqa: PLC0415 -- heavy

    for cls in family(BaseModelLoader):
        if "load_model" in cls.__dict__:
            session.replace(cls, "load_model", _load_model(session, cls.__dict__["load_model"]))


def _load_model(session: Session, original: Any) -> Any:
    @functools.wraps(original)
    def load_model(loader: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if "load_weights" in vars(loader):  # a subclass's load_model that calls its parent's
            return original(loader, vllm_config, model_config, *args, **kwargs)
        role = _role(session, vllm_config, model_config)
        if role == "drafter":
            session.journal.guard("claiming the drafter's config", lambda: _claim(session, model_config))
        inner, name = loader.load_weights, type(loader).__name__

        def load_weights(model: Any, config: Any) -> Any:
            return session.load(role, model, str(config.model), name, lambda: inner(model, config))

        loader.load_weights = load_weights
        try:
            model = original(loader, vllm_config, model_config, *args, **kwargs)
        finally:
            del loader.load_weights
        session.journal.guard("after loading", lambda: _loaded(session, role, model))
        return model

    return load_model


def _role(session: Session, vllm_config: Any, model_config: Any) -> str:
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    drafting = model_config is draft or getattr(model_config, "runner", "") == "draft"
    return "drafter" if drafting or session.journal.is_drafter(model_config.model) else "target"


def _loaded(session: Session, role: str, model: Any) -> None:
    if role == "target":
        session.watch_setter(model, _SETTER)
    if session.loaded(role, model):
        session.serve(_CAPTURED)
        _hook_serving(session)


def _hook_serving(session: Session) -> None:
    """Wrap the runner and the proposer, which exist by the time a drafter is loaded: whatever classes they are."""
    hooked = {"execute_model": 0, "propose": 0}
    wrap = {"execute_model": _execute_model, "propose": _propose}
    for cls in imported(_RUNNERS, *_PROPOSERS):
        for name, wrapper in wrap.items():
            if name in cls.__dict__ and hasattr(cls, "load_model"):
                session.replace(cls, name, wrapper(session, cls.__dict__[name]))
                hooked[name] += 1
    for name, count in hooked.items():
        if not count:
            raise LookupError(
                f"no class with `{name}` and `load_model` in vLLM's modules {_RUNNERS}*, {_PROPOSERS[0]}*"
            )


def _dummy(given: dict[str, Any]) -> bool:
    """V2 passes `dummy_run` and `is_profile`; V1 has methods of their own for such runs, which are not hooked."""
    return bool(given.get("dummy_run") or given.get("is_profile"))


def _execute_model(session: Session, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        def begin() -> None:
            given = signature.bind(runner, *args, **kwargs).arguments
            scheduled = given.get("scheduler_output")
            tokens = getattr(scheduled, "total_num_scheduled_tokens", 0)
            drafts = getattr(scheduled, "scheduled_spec_decode_tokens", None)  # v1/core/sched/output.py
            session.step(runner, real=tokens > 0 and not _dummy(given), decode=bool(drafts))

        if getattr(runner, "model", None) is not None:  # not a worker, which holds a runner
            session.journal.guard("before a step", begin)
        return original(runner, *args, **kwargs)

    return execute_model


def _propose(session: Session, original: Any) -> Any:
    signature = inspect.signature(original)
    if not set(_FEATURES) & set(signature.parameters):
        return original  # `*args`: it passes the features on to one that names them

    @functools.wraps(original)
    def propose(proposer: Any, *args: Any, **kwargs: Any) -> Any:
        def features() -> tuple[list[Any], bool]:
            given = signature.bind(proposer, *args, **kwargs).arguments
            value: Any = next((given[name] for name in _FEATURES if given.get(name) is not None), [])
            return (list(value) if isinstance(value, (list, tuple)) else [value]), not _dummy(given)

        def rows() -> tuple[Any, Any]:
            return _rows(signature.bind(proposer, *args, **kwargs).arguments)

        return session.propose(proposer, features, rows, lambda: original(proposer, *args, **kwargs))

    return propose


def _rows(given: dict[str, Any]) -> tuple[Any, Any]:
    """Return the target's token ids and positions of the rows of the features; None where they are not named.

    V1 names them as arguments (v1/spec_decode/llm_base_proposer.py, 0.32.0); V2 passes its batch, which is padded
    beyond `num_tokens` (v1/worker/gpu/input_batch.py).
    """
    batch = given.get("input_batch")
    if batch is None:
        return given.get("target_token_ids"), given.get("target_positions")
    return batch.input_ids[: batch.num_tokens], batch.positions[: batch.num_tokens]
