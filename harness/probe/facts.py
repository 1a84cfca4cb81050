"""What the probe saw inside the engine's processes, as frozen facts. Format: docs/evidence.md."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

__all__ = [
    "Absent",
    "After",
    "Capture",
    "ConfigKey",
    "Evidence",
    "Fate",
    "Key",
    "Load",
    "Parameter",
    "Place",
    "Projection",
    "Proposal",
    "Serving",
    "Stray",
]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the engine a fact was seen. Ranks count from 0; sizes are 1 without parallelism."""

    pid: int
    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int


class After(enum.StrEnum):
    """What became of a tensor between the end of the load and the end of the record of serving."""

    NOT_COMPARED = "not compared"  # the target's, a tensor without checkpoint data, or the drafter has not served
    SAME = "same"  # the same type, shape and values, as far as they were sampled
    LENT = "the target's"  # it has the memory of a tensor of the target: `Serving.shared`
    REPACKED = "repacked"  # changed before the model was ready, where the layer's own method may repack its tensors
    CHANGED = "changed"  # other values, type or shape, or gone, and no method of its layer was there to do it
    UNREADABLE = "cannot be read"  # its elements cannot be looked at


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One tensor of a loaded model, as it stood when the engine's `load_weights` returned (this rank's shard).

    `kind` is "parameter", "buffer" or "attribute" (a tensor that checkpoint data reached without being registered, such
    as a derived d2t map). Of the `elements`, `written` hold data that came from the checkpoint `keys`, `filled` were
    set while loading to data that came from no key (padding, for instance), and the rest were not touched by the load.
    `writes` counts the write operations that reached it, `rewritten` the elements whose checkpoint data was
    replaced by that of another write. `aliases` are other names in the same model with the same memory.
    `exact` is false where the counts are upper bounds; `unseen_change` is true where the values changed without a
    write that the probe could see. `after` is a value of `After`; `after_detail` says when or by which method, and from
    which type and shape to which.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    written: int
    filled: int
    writes: int
    rewritten: int
    keys: tuple[str, ...]
    aliases: tuple[str, ...]
    exact: bool
    unseen_change: bool
    after: str
    after_detail: str

    @property
    def untouched(self) -> int:
        """Elements that still hold whatever construction left there."""
        return self.elements - self.written - self.filled

    @property
    def never_written(self) -> bool:
        """No element came from the checkpoint."""
        return self.elements > 0 and self.written == 0

    @property
    def partly_written(self) -> bool:
        """Some elements came from the checkpoint and some did not."""
        return 0 < self.written < self.elements


class Fate(enum.StrEnum):
    """What became of a checkpoint key in one load."""

    USED = "used"  # its data is in a parameter, buffer or attribute of the loaded model
    OVERWRITTEN = "overwritten"  # its data landed, and was entirely replaced afterwards
    READ = "read as values"  # Python code read its values (item(), tolist(), numpy()); where they went is not visible
    DROPPED = "dropped"  # offered to the model's load_weights, landed nowhere
    NEVER_OFFERED = "never offered"  # in the checkpoint's files, never handed to load_weights


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a checkpoint. `shape` and `dtype` (safetensors' name, e.g. "BF16") come from the file's header.

    `in_files` is false for a key that was offered but stands in no header (renamed by the engine's iterator, or the
    headers could not be read: see `Load.limits`). `landed` names the tensors of the model that hold its data.
    Of its `size` bytes, `taken` are the rectangles that were copied there (`harness.probe.extent`), on this rank; None
    where that cannot be told, because the data went through computed tensors in parts, or in too many pieces.
    """

    name: str
    in_files: bool
    shape: tuple[int, ...]
    dtype: str
    offered: int
    landed: tuple[str, ...]
    read_as_values: bool
    overwritten: bool
    size: int
    taken: tuple[tuple[int, int, int, int, int], ...] | None

    @property
    def fate(self) -> Fate:
        """The one word for it; the strongest that applies."""
        if self.landed:
            return Fate.USED
        if self.overwritten:
            return Fate.OVERWRITTEN
        if self.read_as_values:
            return Fate.READ
        return Fate.DROPPED if self.offered else Fate.NEVER_OFFERED


@dataclasses.dataclass(frozen=True)
class Load:
    """One load of one model in one process. `error` is the exception's text where the load raised, else "".

    `tapped` is false where the engine's loader did not go through the model's `load_weights`, so that no key could be
    followed. `limits` says in words what could not be seen.
    """

    role: str
    place: Place
    path: str
    model_class: str
    loader: str
    tapped: bool
    error: str
    seconds: float
    parameters: tuple[Parameter, ...]
    keys: tuple[Key, ...]
    limits: tuple[str, ...]

    def parameter(self, name: str) -> Parameter:
        """Return the tensor of that name; raises KeyError."""
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(name)

    def key(self, name: str) -> Key:
        """Return the checkpoint key of that name; raises KeyError."""
        for key in self.keys:
            if key.name == name:
                return key
        raise KeyError(name)


@dataclasses.dataclass(frozen=True)
class Capture:
    """One chunk (as wide as the target's hidden state) of the features that reached the drafter, identified by value.

    `layers` are the target layers k whose *input* (residual stream entering layer k; k = number of layers means the
    output of the last) equals the chunk, bit for bit if `exact`, else within the relative distance `distance` (L2, at
    most 1e-2). Several layers are listed where the stream did not change between them. `final_norm` is true where the
    chunk equals what the target's forward returned (after the final norm). Nothing matched: `layers` is empty.
    """

    chunk: int
    layers: tuple[int, ...]
    final_norm: bool
    exact: bool
    distance: float


@dataclasses.dataclass(frozen=True)
class Stray:
    """A row of the features that is of another token's states, or of several tokens'.

    `held` are, for each chunk, the rows of the target's pass that it equals (several where states are the same; none:
    not one of this pass), `own` the row that it should be; empty where several may be.
    """

    row: int
    own: tuple[int, ...]
    held: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """One real call of the engine's proposer (dummy, profiling and warm-up runs are never among these).

    `feature_width` is the width of what the target handed over; `projection_widths` the input width of each call of
    the drafter's input projection that could be seen, in order; `passes` the number of forward passes of the drafter
    that could be seen and `pass_widths` the widths of the hidden state each was given; `layers_entered` how often a
    decoder layer of it was seen to run. `decode` is true where the target's pass verified drafts: not the prefill of a
    prompt. `compared` rows of the features were looked for among the target's; `strays` are those not in their place.
    """

    rows: int
    feature_width: int
    projection_widths: tuple[int, ...]
    passes: int
    pass_widths: tuple[int, ...]
    layers_entered: int
    decode: bool
    captures: tuple[Capture, ...]
    compared: int
    strays: tuple[Stray, ...]

    def layers(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk, in order, the target layers whose input it equals."""
        return tuple(capture.layers for capture in self.captures)


@dataclasses.dataclass(frozen=True)
class Projection:
    """The drafter's input projection. `found_by` is "key" (filled by a checkpoint key named fc) or "shape"."""

    module: str
    in_features: int
    out_features: int
    found_by: str


@dataclasses.dataclass(frozen=True)
class Serving:
    """The drafter at work in one process.

    `requested` is what the engine passed to the target's setter of auxiliary layers, `declared` what the target's
    attribute said while serving: what the engine *says*, beside `proposals[i].captures`, what it *does*. None where
    there was no such call or attribute. `shared` pairs a drafter tensor's name with the target tensor whose memory it
    has. `unobserved` says in words what could not be seen (compiled code, replayed graphs). `complete` is true when
    every hook has been removed again.
    """

    place: Place
    runner: str
    proposer: str
    target_class: str
    drafter_class: str
    target_layers: int
    target_hidden_size: int
    projection: Projection | None
    requested: tuple[int, ...] | None
    declared: tuple[int, ...] | None
    proposals: tuple[Proposal, ...]
    dummy_proposals: int
    shared: tuple[tuple[str, str], ...]
    unobserved: tuple[str, ...]
    complete: bool

    @property
    def went_around(self) -> int:
        """Real proposals in which the drafter's layers were seen to run, and not the projection that it has."""
        if self.projection is None:
            return 0
        return sum(not proposal.projection_widths and proposal.layers_entered > 0 for proposal in self.proposals)


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """One leaf of the drafter's config.json, by dotted path. `value` is the file's; `seen` what the engine's code got.

    `read` is true if the engine's code read it in any process, other than to copy it from one config into another;
    `readers` are the modules that read it, copying ones included.
    """

    path: str
    value: Any
    read: bool
    readers: tuple[str, ...]
    seen: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Absent:
    """A key that the engine asked the drafter's config for and that is not there: what it would have honoured."""

    path: str
    readers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything one run of the engine left: loads and serving per rank, config reads united over all processes.

    `engine_path` is the folder that the engine's package was imported from.
    """

    engine: str
    engine_version: str
    engine_path: str
    target: str
    drafter: str
    loads: tuple[Load, ...]
    servings: tuple[Serving, ...]
    config: tuple[ConfigKey, ...]
    absent: tuple[Absent, ...]

    def of(self, role: str) -> tuple[Load, ...]:
        """Return the loads of "target" or "drafter", by data-parallel rank, then rank."""
        return tuple(load for load in self.loads if load.role == role)

    def fates(self, role: str) -> dict[str, Fate]:
        """Return what became of each checkpoint key over all ranks: the best of its fates.

        A rank whose shard consists of padding alone has no use for a key that the others use.
        """
        order = list(Fate)
        found: dict[str, Fate] = {}
        for load in self.of(role):
            for key in load.keys:
                found[key.name] = min(found.get(key.name, key.fate), key.fate, key=order.index)
        return found

    def config_key(self, path: str) -> ConfigKey:
        """Return the leaf of the drafter's config at that dotted path; raises KeyError."""
        for key in self.config:
            if key.path == path:
                return key
        raise KeyError(path)
