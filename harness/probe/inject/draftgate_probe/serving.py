"""Record the drafter at work: what the target hands over, by value, and what the drafter does with it."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from .features import integers
from .matching import (
    Located,
    add,
    decoder_layers,
    drafter_layers,
    final_norms,
    find_projection,
    hidden_size,
    locate,
    merge,
    owners,
    positions,
    shared,
    stream,
    travelling,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .matching import Rows

ENOUGH = 3
"""Real proposals after which everything is known and all hooks are removed."""


class _UnseenError(Exception):
    """What a proposal's features are cannot be told; the text says why."""


class Proposal:
    """One call of the proposer, while it runs."""

    def __init__(self, rows: int, feature_width: int, located: Located, *, decode: bool) -> None:
        self.rows = rows
        self.feature_width = feature_width
        self.located = located
        self.decode = decode
        self.projection_widths: list[int] = []
        self.pass_widths: list[int] = []
        self.passes = 0
        self.layers_entered = 0


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
        self._streams: dict[int, Rows | None] = {}
        self._final: Rows | None = None
        self._ran: list[int] | None = None
        self._layer_positions: Any = None
        self._real = False
        self._decode = False
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
                    "layers_entered": proposal.layers_entered,
                    "decode": proposal.decode,
                    "captures": proposal.located.captures,
                    "compared": proposal.located.compared,
                    "strays": proposal.located.strays,
                }
                for proposal in self._proposals
            ],
            "dummy_proposals": self._dummies,
            "shared": self._shared,
            "unobserved": sorted(self._unobserved),
            "complete": self.complete,
        }

    def step_begins(self, *, real: bool, decode: bool, ran: Any = None) -> None:
        """Say that the target is about to run: `real` is false for profiling, warm-up and capture runs.

        `decode` is true where it verifies drafts, `ran` the positions of its rows; None: what its layers are given.
        """
        self.propose_ends()
        if self.complete:
            return
        self._real, self._decode = real, decode
        self._forget()
        self._ran = integers(ran) if real and ran is not None else None
        if real and not self._handles:
            self._hook()

    def _forget(self) -> None:
        self._streams.clear()
        self._final = self._ran = self._layer_positions = None

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
            for layer in drafter_layers(self._drafter, self._load, name):
                self._watch_input(layer, self._drafter_layer_in)
        self._shared = shared(self._target, self._drafter)

    def _watch_input(self, module: Any, hook: Any) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _layer_in(self, index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._real and not torch.compiler.is_compiling():
            with self._guard("a layer's input"):
                value = stream(module, args, kwargs, self._width)
                if value is not None:
                    self._streams[index] = value
                if self._ran is None and self._layer_positions is None:
                    self._layer_positions = positions(module, args, kwargs)

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
                self._final = merge([value], self._width)

    def _projection_in(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._current is not None and not torch.compiler.is_compiling():
            value = next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
            self._current.projection_widths.append(int(value.shape[-1]))

    def _drafter_in(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._current is not None and not torch.compiler.is_compiling():
            values = [kwargs.get("hidden_states"), *args, *kwargs.values()]
            self.drafter_pass(next((v for v in values if torch.is_tensor(v) and v.is_floating_point()), None))

    def _drafter_layer_in(self, _module: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._current is not None and not torch.compiler.is_compiling():
            self._current.layers_entered += 1

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

    def propose_begins(self, features: list[Any], handed: Any = None, *, real: bool) -> None:
        """Say that the proposer was called with these features (one wide tensor, or one tensor per chunk).

        `handed` are the positions of the target's tokens that their rows are of, if known; rows beyond are padding.
        """
        if self.complete:
            return
        if not real or not self._real:
            self._dummies += 1
            return
        features = [feature.reshape(-1, feature.shape[-1]) for feature in features]
        width = sum(feature.shape[-1] for feature in features)
        rows = min((feature.shape[0] for feature in features), default=0)
        self._current = Proposal(rows, width, self._locate(features, rows, handed), decode=self._decode)

    def propose_ends(self) -> None:
        """Say that the proposer returned."""
        if self._current is None:
            return
        self._proposals.append(self._current)
        if not self._current.passes:
            self._unobserved.add("a proposal ran no Python code of the drafter (a replayed graph)")
        self._current = None
        self._forget()
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

    def _locate(self, features: list[Any], rows: int, handed: Any) -> Located:
        """Return what the rows of the features are; if it cannot be told, nothing, and note why."""
        try:
            return self._found(features, rows, handed)
        except _UnseenError as error:
            self._unobserved.add(str(error))
            return Located([], 0, [])

    def _found(self, features: list[Any], rows: int, handed: Any) -> Located:
        if not features:
            raise _UnseenError("the proposer was given no features of the target")
        streams = {index: value for index, value in self._streams.items() if value is not None}
        if not streams:
            raise _UnseenError("the target's layers ran none of their Python code (compiled or a replayed graph)")
        widths = [int(feature.shape[-1]) for feature in features if feature.shape[-1] % self._width]
        if widths:
            raise _UnseenError(f"features {widths[0]} wide are no multiple of the hidden size {self._width}")
        ran, layers = self._ran, self._layer_positions
        if ran is None and layers is not None and (handed is None or handed.dim() == layers.dim()):
            ran = integers(layers)  # of M-RoPE, which counts otherwise, only where both are
        places = None if handed is None else integers(handed)
        if places is not None and len(places) <= rows:
            rows = len(places)
        else:
            places = None
        total = max(value.total for value in streams.values()) if ran is None else len(ran)
        whole = {index: value.values for index, value in streams.items() if value.total >= total}
        may, ordered = owners(rows, total, places, ran)
        if not may or not whole:
            raise _UnseenError(
                f"{rows} rows were handed over, and none could be compared with the {total} of the target"
            )
        if not ordered:
            self._unobserved.add("the target ran on a tree of drafts: which row is of which token is not certain")
        final = self._final.values if self._final is not None and self._final.total >= total else None
        chunks = [chunk for feature in features for chunk in feature.split(self._width, dim=-1)]
        located = locate(chunks, whole, final, may, ordered=ordered)
        unseen = sorted(set(range(len(self._layers))) - set(whole))
        if unseen and not all(capture["layers"] or capture["final_norm"] for capture in located.captures):
            raise _UnseenError(
                f"the inputs of layers {unseen} could not be seen here (another pipeline stage, or partial sums)"
            )
        return located
