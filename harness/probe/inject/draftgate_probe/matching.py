"""Recognise things by what they are, not by their class: layers, the projection, shared memory, equal values."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .lineage import storage_id
from .loading import walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROWS = 64
"""Token rows of each layer's input that are kept for one step, and compared."""

CLOSE = 1e-2
"""Largest relative L2 distance at which a chunk that is not bit-equal still counts as a layer's input."""

_FC = re.compile(r"(?:^|\.)fc(?:\.\d+)?\.weight$")


class Rows(NamedTuple):
    """The first `ROWS` token rows [rows, hidden] of a state, and how many rows it had in all."""

    values: Any
    total: int


class Located(NamedTuple):
    """What a proposal's features were found to be; empty where it could not be told.

    The keys of `captures` and `strays` are those of `Capture` and `Stray` in harness/probe/facts.py.
    """

    captures: list[dict[str, Any]]
    compared: int
    strays: list[dict[str, Any]]


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder layers of a model: the longest list of modules beside its token embedding.

    A vision tower's list may be longer than the language model's; positions have embeddings too, but of fewer rows.
    Where no list is beside an embedding (a later pipeline stage), the longest. Raises LookupError if there is none.
    """
    lists = [
        (owner, module)
        for owner in model.modules()
        for module in owner.children()
        if isinstance(module, torch.nn.ModuleList)
    ]
    if not lists:
        raise LookupError(f"{type(model).__name__} has no ModuleList to find its decoder layers in")
    tallest = max((_embedded(module) for module in model.modules()), default=0)
    beside = [each for owner, each in lists if tallest and any(_embedded(m) == tallest for m in owner.children())]
    longest: list[Any] = max(beside or [each for _, each in lists], key=len)
    return list(longest)


def _embedded(module: Any) -> int:
    """Return how many rows an embedding has, by its class's name: torch's, vLLM's and SGLang's end alike. Else 0."""
    weight: Any = getattr(module, "weight", None)
    table = type(module).__name__.endswith("Embedding") and torch.is_tensor(weight) and weight.dim() == 2
    return int(weight.shape[0]) if table else 0


def drafter_layers(drafter: Any, load: dict[str, Any], projection: str) -> list[Any]:
    """Return the drafter's decoder layers, by name: those in lists, and those beside the projection.

    A layer is a module that was loaded with a matrix and a norm. By the load's record, because a loader may pack
    weights away; some of SGLang's drafters have one layer, in no list (models/kimi_k25_eagle3.py, `midlayer`, 0.5.23).
    """
    beside = projection.rpartition(".")[0]
    names = [
        name
        for owner, module in drafter.named_modules()
        if isinstance(module, torch.nn.ModuleList) or owner == beside
        for name in (f"{owner}.{child}".lstrip(".") for child, _ in module.named_children())
    ]
    matrices = [row["name"] for row in load["parameters"] if len(row["shape"]) == 2]
    norms = [row["name"] for row in load["parameters"] if len(row["shape"]) == 1 and "norm" in row["name"]]
    layers = [
        name
        for name in dict.fromkeys(names)
        if all(any(held.startswith(f"{name}.") for held in kind) for kind in (matrices, norms))
    ]
    found = [drafter.get_submodule(name) for name in layers if not f"{projection}.".startswith(f"{name}.")]
    return [module for module in found if not isinstance(module, torch.nn.ModuleList)]


def hidden_size(model: Any, layers: list[Any]) -> int:
    """Return the width of a model's hidden state: the commonest, then longest, of its layers' norms.

    By the parameters' names, because a quantised mixture of experts has more vectors of scales than of norms.
    """
    vectors = [(name, p.shape[0]) for layer in layers for name, p in layer.named_parameters() if p.dim() == 1]
    norms = [length for name, length in vectors if "norm" in name.lower() or "ln" in name.lower()]
    lengths: dict[int, int] = collections.Counter(norms)
    if not lengths:
        raise LookupError(f"{type(model).__name__}: no layer norm to learn the hidden size from")
    return max(lengths, key=lambda length: (lengths[length], length))


def final_norms(model: Any, layers: list[Any], width: int) -> list[Any]:
    """Return the norms beside a model's decoder layers: modules with nothing but vectors of the hidden size."""
    last = layers[-1]
    for owner in model.modules():
        for child in owner.children():
            if isinstance(child, torch.nn.ModuleList) and any(layer is last for layer in child):
                beside = [(module, list(module.parameters())) for module in owner.children()]
                return [module for module, held in beside if held and all(tuple(p.shape) == (width,) for p in held)]
    return []


def find_projection(drafter: Any, load: dict[str, Any], width: int) -> tuple[str, Any, str, list[int]] | None:
    """Return name, module, how it was found and shape of the drafter's input projection, or None if it has none.

    By lineage: the module of the matrix that a checkpoint key named `fc` filled. Failing that (no such key, or it was
    dropped) by shape: a matrix outside every list of layers that takes a multiple, at least twice, of the target's
    hidden size.
    """
    modules = dict(drafter.named_modules())
    for row in load["parameters"]:
        if len(row["shape"]) == 2 and any(_FC.search(key) for key in row["keys"]):
            owner = row["name"].rpartition(".")[0]
            if owner in modules:
                return owner, modules[owner], "key", row["shape"]
    inside = {
        id(child)
        for module in drafter.modules()
        if isinstance(module, torch.nn.ModuleList)
        for layer in module
        for child in layer.modules()
    }
    for row in load["parameters"]:
        owner = row["name"].rpartition(".")[0]
        if len(row["shape"]) != 2 or owner not in modules or id(modules[owner]) in inside:
            continue
        if row["shape"][1] >= 2 * width and row["shape"][1] % width == 0:
            return owner, modules[owner], "shape", row["shape"]
    return None


def shared(target: Any, drafter: Any) -> list[list[str]]:
    """Return [drafter tensor, target tensor] for each drafter tensor that has the memory of one of the target's."""
    places: dict[Any, str] = {}
    for name, _, tensor in walk(target):
        if tensor.numel() and storage_id(tensor) is not None:
            places.setdefault((storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape)), name)
    pairs = []
    for name, _, tensor in walk(drafter):
        at = (storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and at in places:
            pairs.append([name, places[at]])
    return pairs


@functools.cache
def _signature(forward: Any) -> inspect.Signature:
    return inspect.signature(forward)


def stream(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], width: int) -> Any:
    """Return the residual stream in a layer's arguments: the hidden state, plus the residual where there is one.

    By the names of the layer's arguments (`hidden_states`, `residual`: every decoder layer of vLLM and SGLang), or by a
    residual that travels beside them (`travelling`); a layer that names them otherwise gives its first tensor of the
    hidden size. None where the hidden state is only this rank's part of a sum (SGLang leaves some sums to the next
    layer's fused kernel: `_sglang_needs_allreduce_fusion`, 0.5.1 to 0.5.20; `OwedOutput`, 0.5.23).
    """
    given = _signature(type(module).forward).bind(module, *args, **kwargs).arguments
    hidden, beside = given.get("hidden_states"), travelling(given.values())
    if getattr(hidden, "_sglang_needs_allreduce_fusion", False):
        return None
    if beside is not None:
        return add(hidden, beside, width)
    parts = [value for value in (hidden, given.get("residual")) if torch.is_tensor(value)]
    return merge(parts or given.values(), width, limit=2 if parts else 1)


def travelling(values: Any) -> Any:
    """Return the residual stream object that one of these values carries, or None.

    SGLang 0.5.23, layers/layer_boundary/residual/stream.py: `forward_batch.residual_stream`. Its `residual` is the
    whole stream, unless `pending` is set: then the last output is still to be added.
    """
    found = (getattr(value, "residual_stream", None) for value in values if not torch.is_tensor(value))
    return next((value for value in found if value is not None), None)


def add(hidden: Any, beside: Any, width: int) -> Any:
    """Return hidden state plus travelling residual, as rows; None where the sum is not a plain one or not yet whole."""
    pending = beside.pending
    if not torch.is_tensor(hidden) or (pending is not None and not pending.update.is_plain_add):
        return None
    parts = [hidden] if pending is None or beside.residual is None else [hidden, beside.residual]
    return merge(parts, width)


def merge(values: Iterable[Any], width: int, limit: int = 2) -> Rows | None:
    """Return the sum of the first tensors (at most `limit`) of that width, as rows; None if there is none."""
    wide = [value for value in values if torch.is_tensor(value) and value.shape[-1:] == (width,)]
    parts = [value.reshape(-1, width) for value in wide if value.is_floating_point()][:limit]
    if not parts:
        return None
    total = int(parts[0].shape[0])
    if len(parts) == 2 and parts[0].shape == parts[1].shape:
        return Rows(parts[0][:ROWS] + parts[1][:ROWS], total)
    return Rows(parts[0][:ROWS].clone(), total)  # layers reuse these buffers in place


def positions(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a copy of a layer's argument `positions` (every decoder layer of vLLM and SGLang), or None."""
    given: Any = _signature(type(module).forward).bind(module, *args, **kwargs).arguments.get("positions")
    return given.clone() if torch.is_tensor(given) else None


def owners(
    rows: int, total: int, handed: Sequence[int] | None, ran: Sequence[int] | None
) -> tuple[dict[int, list[int]], bool]:
    """Return, for each row of the features that can be compared, the target's rows that it may be of.

    `handed` are the positions of the features' rows, `ran` those of the `total` rows that the target ran on; None
    where not known. Also returns whether the rows keep the target's order. The engines hand over the target's rows as
    they stand, or some of them in their order (vLLM 0.32.0, v1/worker/gpu_model_runner.py `propose_draft_token_ids`,
    rejected rows left out, and v1/worker/gpu/spec_decode/target_dependent_ar; SGLang 0.5.23,
    speculative/eagle_worker_v2.py). So equal positions settle it; else a row is of the target's row at its position. A
    tree of drafts has a position twice, its accepted path is moved to the front (eagle_worker_common.py,
    `finalize_tree_path`), and nothing is certain.
    """
    ordered = True
    may: dict[int, Sequence[int]]
    if handed is None or ran is None:
        spare = max(total - rows, 0)
        may = {row: range(row, row + spare + 1) for row in range(rows)}
    elif list(handed) == list(ran[:rows]):
        may = {row: (row,) for row in range(rows)}
    elif any(one == next_ for one, next_ in itertools.pairwise(ran)):
        may, ordered = dict.fromkeys(range(rows), range(total)), False
    else:
        may = {row: [at for at, place in enumerate(ran) if place == handed[row]] for row in range(rows)}
    return {row: list(found) for row, found in may.items() if found and found[-1] < min(total, ROWS)}, ordered


def locate(
    chunks: Sequence[Any], streams: Mapping[int, Any], final: Any, may: Mapping[int, Sequence[int]], *, ordered: bool
) -> Located:
    """Return which layers' inputs the chunks are, and which rows are of another token.

    `streams` are the layers' inputs and `final` the target's output, [target rows, hidden]; `may` and `ordered` are
    what `owners` returned. Every chunk of a row must be of one of its target rows, and of the same; where order is
    kept, later rows are of later ones. Equal states (a token repeated) are of each other. A chunk whose rows are not
    in their places is the layer that half of them equal in any place.
    """
    known = {**streams, **({} if final is None else {_FINAL: final})}
    captures: list[dict[str, Any]] = []
    held: list[dict[int, set[int]]] = []
    for number, chunk in enumerate(chunks):
        apart = {index: _apart(chunk, values, list(may)) for index, values in known.items()}
        found, nearest = _equal(apart, may)
        if nearest > 0.0:
            anywhere = dict.fromkeys(may, range(min(len(values) for values in known.values())))
            other, distance = _equal(apart, anywhere, half=not found)
            if not found or distance == 0.0:  # near in its place is less than equal in another
                found, nearest = other, distance
        captures.append(
            {
                "chunk": number,
                "layers": sorted(found.keys() - {_FINAL}),
                "final_norm": _FINAL in found,
                "exact": nearest == 0.0,
                "distance": nearest if nearest != float("inf") else -1.0,
            }
        )
        held.append({row: set().union(*(rows[row] for rows in found.values())) for row in may} if found else {})
    return Located(captures, len(may), _strays(held, may, ordered=ordered))


_FINAL = -1
"""The target's output among the layers."""


def _apart(chunk: Any, recorded: Any, rows: Sequence[int]) -> dict[int, list[float]]:
    """Return how far each of these rows is from each recorded one: 0.0 where bit-equal, else relative L2."""
    mine = chunk[list(rows)]
    how = "donot_use_mm_for_euclid_dist"  # the other way loses what is small beside the norms
    far = torch.cdist(mine.float()[None], recorded.float()[None], compute_mode=how)[0]
    far = far / mine.float().norm(dim=-1, keepdim=True).clamp_min(1e-20)
    far = far.nan_to_num(nan=float("inf")).clamp_min(1e-12)  # 0.0 is kept for bit-equal
    if mine.dtype == recorded.dtype:
        near = (far <= CLOSE).nonzero()
        same = (mine[near[:, 0]] == recorded[near[:, 1]]).all(-1)
        far[near[same, 0], near[same, 1]] = 0.0
    return dict(zip(rows, far.tolist(), strict=True))


def _equal(
    apart: Mapping[int, Mapping[int, Sequence[float]]], may: Mapping[int, Sequence[int]], *, half: bool = False
) -> tuple[dict[int, dict[int, set[int]]], float]:
    """Return the layers of which every row (or half of them) equals one that it may be of, with those.

    Also returns how far the nearest layer is, in the last of these rows.
    """
    last = (len(may) - 1) // 2 if half else -1
    worst = {
        index: sorted(min(distances[row][at] for at in allowed) for row, allowed in may.items())[last]
        for index, distances in apart.items()
    }
    nearest = min(worst.values())
    limit = 0.0 if nearest == 0.0 else CLOSE
    return {
        index: {row: {at for at in allowed if apart[index][row][at] <= limit} for row, allowed in may.items()}
        for index, distance in worst.items()
        if distance <= limit
    }, nearest


def _strays(
    held: Sequence[Mapping[int, set[int]]], may: Mapping[int, Sequence[int]], *, ordered: bool
) -> list[dict[str, Any]]:
    """Return the rows of which no target row explains every chunk; of each, what its chunks are instead."""
    strays: list[dict[str, Any]] = []
    last = -1
    for row, allowed in may.items():
        fits = set(allowed).intersection(*(each[row] for each in held if each))
        if ordered:
            fits = {at for at in fits if at > last}
            last = min(fits, default=last)
        if not fits:
            own = list(allowed) if len(allowed) == 1 else []
            strays.append({"row": row, "own": own, "held": [sorted(each.get(row, ())) for each in held]})
    return strays
