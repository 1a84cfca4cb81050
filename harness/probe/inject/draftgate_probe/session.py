"""One process of the engine under watch: what is hooked, what was loaded, and how to let go. Knows no engine.

An engine's attachment says when things happen; this says what is recorded then, and keeps every failure of ours away
from the engine.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .afterwards import Afterwards
from .config import ConfigReads
from .features import FeatureRecorder
from .loading import LoadRecorder
from .matching import shared
from .serving import ServingRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from .journal import Journal


class Session:
    """The recorders of one process. `place` returns where in the engine it stands (ranks and sizes)."""

    def __init__(self, journal: Journal, place: Callable[[], dict[str, int]]) -> None:
        self.journal = journal
        self.serving: ServingRecorder | None = None
        self.requested: list[int] | None = None
        self._place = place
        self._known_place: dict[str, int] | None = None
        self._config: ConfigReads | None = None
        self._undo: list[Callable[[], None]] = []
        self._models: dict[str, Any] = {}
        self._loads: dict[str, dict[str, Any]] = {}
        self._number = 0
        self._afterwards: Afterwards | None = None
        self._written: tuple[dict[str, Any], str] = ({}, "")
        self._proposing = False
        self._features = FeatureRecorder.from_environment()
        self._real = False
        self._taken = False

    def start(self, hooks: dict[str, Callable[[], None]]) -> None:
        """Install the attachment's hooks, by name. One that cannot be installed is a fault and no more."""
        for what, hook in hooks.items():
            self.journal.attach(what, hook)
        self.journal.write_process()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        if self._config is not None:
            self._config.forked()
        self.journal.write_process()

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put a function of ours in the place of a class's own, until the evidence is complete."""
        old = owner.__dict__[name]
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old))

    def watch_config(self, base: Any) -> None:
        """Record config reads; `base` is the config library's base class."""
        self._config = ConfigReads(self.journal, base)
        self._config.install()

    def claim(self, *configs: Any) -> None:
        """Say that config objects are the drafter's."""
        if self._config is not None:
            for config in configs:
                self._config.claim(config)

    def load(self, role: str, model: Any, path: str, loader: str, run: Callable[[], Any]) -> Any:
        """Run the engine's loading of one model's weights and record it, raising or not. Returns what `run` returns."""
        try:
            recorder = LoadRecorder(model, path, self.journal.fault)
        except Exception as error:  # noqa: BLE001 -- the engine must load its weights whatever we do
            self.journal.fault(f"recording the {role}'s load", error)
            return run()
        try:
            with recorder:
                return run()
        finally:
            about = {
                "path": path,
                "loader": loader,
                "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
            }
            self.journal.guard(f"the {role}'s load", lambda: self._write_load(role, model, about, recorder))

    def _write_load(self, role: str, model: Any, about: dict[str, Any], recorder: LoadRecorder) -> None:
        facts = {"role": role, "place": self._where(), **about, **recorder.facts()}
        self._loads[role] = facts
        self._number += 1
        suffix = f"-{self._number}"
        self.journal.write(f"load-{role}", facts, suffix=suffix)
        if role == "drafter" and self.serving is None:  # of several drafters, the first is watched at work
            self._written = facts, suffix
            self._afterwards = Afterwards(model, [row["name"] for row in facts["parameters"] if row["keys"]])

    def loaded(self, role: str, model: Any) -> bool:
        """Say that a model is ready; returns True once, when both are and `serve` is to be called."""
        if role == "drafter" and self.serving is None and self._afterwards is not None:
            self._afterwards.ready()
        self._models[role] = model
        return self.serving is None and {"target", "drafter"} <= set(self._models)

    def watch_setter(self, target: Any, name: str) -> None:
        """Note what the engine passes to the target's method by which it asks for auxiliary layers, if it has one."""
        original = getattr(target, name, None)
        if original is None:
            return

        def setter(layers: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.requested = None if layers is None else [int(layer) for layer in layers]
            return original(layers, *args, **kwargs)

        setattr(target, name, setter)
        self._undo.append(lambda: vars(target).pop(name, None))

    def serve(self, attribute: str, *, called: bool = True) -> None:
        """Get ready to watch the drafter. `attribute` holds the target's captured layers, in some module of it.

        `called` is false where the engine calls the models' `forward` itself: then `draft_pass` says when.
        """
        target, drafter = self._models["target"], self._models["drafter"]
        if self._where()["tp_rank"]:
            self._features = None  # every rank of a tensor group is handed the same
        self.serving = ServingRecorder(
            target, drafter, self._loads["drafter"], self._save, self._done, self.journal.fault, called=called
        )
        self.serving.declared = lambda: next(
            (
                [int(n) for n in getattr(module, attribute)]
                for module in target.modules()
                if getattr(module, attribute, 0)
            ),
            None,
        )
        self._save(self.serving.facts())

    def step(self, runner: Any, *, real: bool, decode: bool, rows: Callable[[], tuple[Any, Any]] | None = None) -> None:
        """Say that a runner is about to run the target; not `real` for profiling, warm-up and capture.

        `decode` is true where it verifies drafts. `rows` returns the token ids and positions of that pass, where only
        the target's runner knows them.
        """
        self._real, self._taken = real, False
        token_ids, ran = rows() if rows is not None and real else (None, None)
        if self._features is not None and ran is not None:
            self._features.target_rows(token_ids, ran)
        if self.serving is not None:
            self.serving.runner = f"{type(runner).__module__}.{type(runner).__qualname__}"
            self.serving.requested = self.requested
            self.serving.step_begins(real=real, decode=decode, ran=ran)

    def propose(
        self,
        proposer: Any,
        features: Callable[[], tuple[list[Any], bool]],
        rows: Callable[[], tuple[Any, Any]],
        run: Callable[[], Any],
    ) -> Any:
        """Run one call of the proposer and record it. `features` returns what it was given and whether it is real.

        `rows` returns the target's token ids and positions, one for each row of the features.
        """
        serving = self.serving
        if (serving is None and self._features is None) or self._proposing:  # a proposer that calls its parent's
            return run()

        def begin() -> None:
            given, real = features()
            self._keep(given, rows, real=real)
            if serving is not None:
                serving.proposer = f"{type(proposer).__module__}.{type(proposer).__qualname__}"
                serving.propose_begins(given, rows()[1] if real else None, real=real)

        self.journal.guard("before a proposal", begin)
        self._proposing = True
        try:
            return run()
        finally:
            self._proposing = False
            if serving is not None:
                self.journal.guard("after a proposal", serving.propose_ends)

    def draft_pass(self, proposer: str, hidden: Any, positions: Any, *, opens: bool, real: bool) -> None:
        """Say that the drafter is about to run on `hidden` (None: on no hidden state), at these positions.

        A pass that `opens` is on the target's features: the first since the target ran begins a proposal, which lasts
        until the target runs again.
        """
        if opens and not self._taken and self._features is not None:
            recorder, self._taken = self._features, True
            given = [] if hidden is None else [hidden]
            self._keep(given, lambda: (recorder.tokens_at(positions), positions), real=real)
        serving = self.serving
        if serving is None:
            return
        if opens and not serving.proposing:
            serving.proposer = proposer
            serving.propose_begins([] if hidden is None else [hidden], positions, real=real)
        serving.drafter_pass(hidden)

    def _keep(self, given: list[Any], rows: Callable[[], tuple[Any, Any]], *, real: bool) -> None:
        """Keep the features of a real proposal, if they are wanted. A failure is a fault, never a gap."""
        recorder = self._features
        if recorder is None or not (real and self._real):
            return
        whole = False
        try:
            recorder.take(given, *rows())
            whole = not recorder.full
        finally:
            if not whole:
                self._features = None
                if self.serving is None:
                    self._let_go()

    def _save(self, facts: dict[str, Any]) -> None:
        if facts["complete"]:
            self._compare()  # before the record that says that all is there
        self.journal.write("serving", {"place": self._where(), **facts})

    def _compare(self) -> None:
        """Write the drafter's load again, with what has become of each of its tensors since."""
        if self._afterwards is not None:
            lent = {mine for mine, _ in shared(self._models["target"], self._models["drafter"])}
            (facts, suffix), found = self._written, self._afterwards.rows(lent)
            rows = [row | found.get(row["name"], {}) for row in facts["parameters"]]
            self.journal.write("load-drafter", facts | {"parameters": rows}, suffix=suffix)
            self._afterwards = None

    def _where(self) -> dict[str, int]:
        """Return the place as it was first: an engine may hide its groups from the drafter."""
        if self._known_place is None:
            self._known_place = self._place()
        return self._known_place

    def _done(self) -> None:
        """Everything is known: unhook, so that the rest of the run costs nothing, unless features are still kept."""
        if self._features is None:
            self._let_go()
        self._models.clear()
        self.serving = None
        if self._config is not None:
            self._config.remove()
        (self.journal.folder / f"complete-{os.getpid()}").touch()

    def _let_go(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
