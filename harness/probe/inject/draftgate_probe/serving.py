"""Record the drafter at work: what the target hands over, by value, and what the drafter does with it."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from .matching import (
    CLOSE,
    ROWS,
    add,
    compare,
    decoder_layers,
    final_norms,
    find_projection,
    hidden_size,
    merge,
    shared,
    stream,
    travelling,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENOUGH = 3
"""Real proposals after which everything is known and all hooks are removed."""


class Proposal:
    """One call of the proposer, while it runs."""

    def __init__(self, rows: int, feature_width: int, captures: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.feature_width = feature_width
        self.captures = captures
        self.projection_widths: list[int] = []
        self.pass_widths: list[int] = []
        self.passes = 0


class ServingRecorder:
    """Watches one target and one drafter from the first real step until `ENOUGH` real proposals were seen.

    The engine's attachment calls `step_begins` before each real forward pass of the target, `propose_begins` and
    `propose_ends` around each call of the proposer; a proposal that is not ended lasts until the target's next pass.
    `called` is false where the engine calls the models' `forward` past their hooks: then the attachment says
    `drafter_pass` as well. `save` receives the facts after each real proposal; `done` is called once, when all hooks
    have been removed.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any,
        drafter_load: dict[str, Any],
        save: Callable[[dict[str, Any]], None],
        done: Callable[[], None],
        fault: Callable[[str, BaseException], None],
        *,
        called: bool = True,
    ) -> None:
        self._called = called
        self._target = target
        self._drafter = drafter
        self._load = drafter_load
        self._save = save
        self._done = done
        self._fault = fault
        self._layers = decoder_layers(target)
        self._width = hidden_size(target, self._layers)
        self._handles: list[Any] = []
        self._streams: dict[int, Any] = {}
        self._final: Any = None
        self._real = False
        self._current: Proposal | None = None
        self._proposals: list[Proposal] = []
        self._dummies = 0
        self._unobserved: set[str] = set()
        self._projection: dict[str, Any] | None = None
        self._shared: list[list[str]] = []
        self.requested: list[int] | None = None
        self.declared: Callable[[], list[int] | None] = lambda: None
        self.proposer = ""
        self.runner = ""
        self.complete = False

    def facts(self) -> dict[str, Any]:
        """Return the evidence so far."""
        return {
            "runner": self.runner,
            "proposer": self.proposer,
            "target_class": type(self._target).__qualname__,
            "drafter_class": type(self._drafter).__qualname__,
            "target_layers": len(self._layers),
            "target_hidden_size": self._width,
            "projection": self._projection,
            "requested": self.requested,
            "declared": self.declared(),
            "proposals": [
                {
                    "rows": proposal.rows,
                    "feature_width": proposal.feature_width,
                    "projection_widths": proposal.projection_widths,
                    "passes": proposal.passes,
                    "pass_widths": proposal.pass_widths,
                    "captures": proposal.captures,
                }
                for proposal in self._proposals
            ],
            "dummy_proposals": self._dummies,
            "shared": self._shared,
            "unobserved": sorted(self._unobserved),
            "complete": self.complete,
        }

    def step_begins(self, *, real: bool) -> None:
        """Say that the target is about to run: `real` is false for profiling, warm-up and capture runs."""
        self.propose_ends()
        if self.complete:
            return
        self._real = real
        self._streams.clear()
        self._final = None
        if real and not self._handles:
            self._hook()

    def _hook(self) -> None:
        for index, layer in enumerate(self._layers):
            self._watch_input(layer, functools.partial(self._layer_in, index))
            for child in layer.children():
                self._watch_input(child, functools.partial(self._inside_layer, index))
        self._handles.append(self._layers[-1].register_forward_hook(self._last_out, with_kwargs=True))
        for norm in final_norms(self._target, self._layers, self._width):
            self._handles.append(norm.register_forward_hook(self._target_out))
        if self._called:
            self._handles.append(self._target.register_forward_hook(self._target_out))
            self._watch_input(self._drafter, self._drafter_in)
        found = find_projection(self._drafter, self._load, self._width)
        if found is not None:
            name, module, how, shape = found
            self._projection = {"module": name, "in_features": shape[1], "out_features": shape[0], "found_by": how}
            self._watch_input(module, self._projection_in)
        self._shared = shared(self._target, self._drafter)

    def _watch_input(self, module: Any, hook: Any) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _layer_in(self, index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._real and not torch.compiler.is_compiling():
            with self._guard("a layer's input"):
                value = stream(module, args, kwargs, self._width)
                if value is not None:
                    self._streams[index] = value

    def _inside_layer(self, index: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a layer's input from the residual that travels through it, where the arguments held only a part."""
        if not torch.compiler.is_compiling() and self._real and index not in self._streams:
            with self._guard("a layer's residual"):
                beside = travelling((*args, *kwargs.values()))
                if beside is not None and beside.pending is None and torch.is_tensor(beside.residual):
                    self._streams[index] = merge([beside.residual], self._width)

    def _last_out(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self._real and not torch.compiler.is_compiling():
            with self._guard("the last layer's output"):
                beside = travelling((*args, *kwargs.values()))
                if beside is not None:
                    value = add(out, beside, self._width)
                else:
                    value = merge(out if isinstance(out, (tuple, list)) else [out], self._width)
                if value is not None:
                    self._streams[len(self._layers)] = value

    def _target_out(self, _module: Any, _args: Any, out: Any) -> None:
        if self._real and not torch.compiler.is_compiling():
            with self._guard("the target's output"):
                value = out[0] if isinstance(out, (tuple, list)) else out
                if torch.is_tensor(value):
                    self._final = value.reshape(-1, value.shape[-1])[:ROWS].clone()

    def _projection_in(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._current is not None and not torch.compiler.is_compiling():
            value = next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
            self._current.projection_widths.append(int(value.shape[-1]))

    def _drafter_in(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._current is not None and not torch.compiler.is_compiling():
            values = [kwargs.get("hidden_states"), *args, *kwargs.values()]
            self.drafter_pass(next((v for v in values if torch.is_tensor(v) and v.is_floating_point()), None))

    def drafter_pass(self, hidden: Any) -> None:
        """Say that the drafter is about to run on this hidden state (None: on none)."""
        if self._current is not None:
            self._current.passes += 1
            if hidden is not None:
                self._current.pass_widths.append(int(hidden.shape[-1]))

    @property
    def proposing(self) -> bool:
        """Whether a real proposal has begun and not ended."""
        return self._current is not None

    def propose_begins(self, features: list[Any], *, real: bool) -> None:
        """Say that the proposer was called with these features (one wide tensor, or one tensor per chunk)."""
        if self.complete:
            return
        if not real or not self._real:
            self._dummies += 1
            return
        features = [feature.reshape(-1, feature.shape[-1]) for feature in features]
        width = sum(feature.shape[-1] for feature in features)
        rows = min((feature.shape[0] for feature in features), default=0)
        self._current = Proposal(rows, width, self._captures(features))

    def propose_ends(self) -> None:
        """Say that the proposer returned."""
        if self._current is None:
            return
        self._proposals.append(self._current)
        if not self._current.passes:
            self._unobserved.add("a proposal ran no Python code of the drafter (a replayed graph)")
        self._current = None
        self._streams.clear()
        self._final = None
        if len(self._proposals) >= ENOUGH:
            self.remove()
            self.complete = True
        self._save(self.facts())
        if self.complete:
            self._done()

    @contextlib.contextmanager
    def _guard(self, where: str) -> Iterator[None]:
        """Keep an exception of ours out of the engine's forward pass; it becomes a fault."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- the engine's answer must not depend on us
            self._fault(where, error)

    def remove(self) -> None:
        """Take every hook off the models."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _captures(self, features: list[Any]) -> list[dict[str, Any]]:
        if not features:
            self._unobserved.add("the proposer was given no features of the target")
            return []
        if not self._streams:
            self._unobserved.add("the target's layers ran none of their Python code (compiled or a replayed graph)")
            return []
        chunks = []
        for feature in features:
            width = int(feature.shape[-1])
            if width % self._width:
                self._unobserved.add(f"features {width} wide are no multiple of the hidden size {self._width}")
                return []
            chunks += list(feature.split(self._width, dim=-1))
        captures = [self._capture(number, chunk) for number, chunk in enumerate(chunks)]
        unseen = sorted(set(range(len(self._layers))) - set(self._streams))
        if unseen and any(not capture["layers"] and not capture["final_norm"] for capture in captures):
            self._unobserved.add(
                f"the inputs of layers {unseen} could not be seen here (another pipeline stage, or partial sums)"
            )
            return []
        return captures

    def _capture(self, number: int, chunk: Any) -> dict[str, Any]:
        distances = {index: compare(chunk, value) for index, value in self._streams.items()}
        final = compare(chunk, self._final) if self._final is not None else float("inf")
        nearest = min([*distances.values(), final])
        limit = 0.0 if nearest == 0.0 else CLOSE
        return {
            "chunk": number,
            "layers": sorted(index for index, distance in distances.items() if distance <= limit),
            "final_norm": final <= limit,
            "exact": nearest == 0.0,
            "distance": nearest if nearest != float("inf") else -1.0,
        }
