"""Follow checkpoint data through torch operations: from the tensors a loader yields to the tensors of the model."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .regions import NOTHING, Keys, Regions, Share, View, gather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

_OVERWRITES = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_",
    "trunc_normal_", "geometric_", "cauchy_", "eye_", "_foreach_copy_", "_foreach_zero_", "set_data",
}  # fmt: skip
"""In-place operations after which nothing of the old contents is left (every `out=` overload is one too)."""

_PLACES = {"index_put_", "_index_put_impl_", "_unsafe_index_put_", "index_copy_", "index_fill_"}
"""In-place operations that write at computed places; they are replayed on a mask to learn which."""

_VALUE_READERS = {getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__")}
"""Ways out of torch that no dispatcher sees."""

_SCALAR_READERS = {"_local_scalar_dense", "item", "equal", "is_nonzero", "allclose"}
"""Operations that turn a tensor's values into a Python scalar."""

_SWEEP = 50_000
"""Storages known before the dead ones among them are forgotten."""


def tensors(values: Iterable[object]) -> list[Any]:
    """Return the tensors among arguments, those in lists, tuples and dicts included."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors(value)
        elif isinstance(value, dict):
            found += tensors(value.values())
    return found


@dataclasses.dataclass(frozen=True)
class _Traits:
    """What an operation's schema says of it: its name, the arguments it writes to, whether it only makes views."""

    name: str
    mutated: tuple[tuple[int, str], ...]
    view: bool


@functools.cache
def _traits(func: Any) -> _Traits:
    schema = func._schema  # noqa: SLF001 -- torch offers no other way
    mutated = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    returns = list(schema.returns)
    view = bool(returns) and not mutated and all(value.alias_info is not None for value in returns)
    return _Traits(schema.name.rpartition("::")[2], mutated, view)


def storage_id(tensor: Any) -> int | None:
    """Return the identity of a tensor's memory, or None where it has none of its own (sparse, wrapper subclasses)."""
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 -- the identity that StorageWeakRef itself uses
    except (NotImplementedError, RuntimeError):
        return None


class Lineage:
    """What every live storage holds. `fault` is told of exceptions inside the tracer."""

    def __init__(self, fault: Callable[[BaseException], None]) -> None:
        self._fault = fault
        # A StorageWeakRef keeps the storage's identity (not its memory) from being used again while we hold it.
        self._storages: dict[int, tuple[StorageWeakRef, Regions]] = {}
        self.read_as_values: set[str] = set()
        self.limits: set[str] = set()
        self.operations = 0

    def __enter__(self) -> Self:
        self._modes = (_Dispatch(self), _Function(self))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exception)

    def regions(self, tensor: Any, *, make: bool = False) -> Regions | None:
        """Return the history of a tensor's storage, if it has one."""
        identity = storage_id(tensor)
        if identity is None:
            return None
        known = self._storages.get(identity)
        if known is None and make:
            if len(self._storages) > _SWEEP:
                self._storages = {i: (ref, r) for i, (ref, r) in self._storages.items() if not ref.expired()}
            known = self._storages[identity] = (StorageWeakRef(tensor.untyped_storage()), Regions())
        return known[1] if known else None

    def offer(self, key: str, tensor: Any) -> None:
        """Say that a tensor holds the data of a checkpoint key."""
        regions = self.regions(tensor, make=True)
        if regions is None:
            self.limits.add(f"{key}: its tensor has no storage to follow ({type(tensor).__name__})")
        else:
            regions.write(View.of(tensor), frozenset({key}))
            regions.own[key] = View.of(tensor)

    def keys(self, tensor: Any) -> Keys:
        """Return the checkpoint keys whose data a tensor holds."""
        regions = self.regions(tensor)
        return regions.keys(View.of(tensor)) if regions else NOTHING

    def share(self, tensor: Any, key: str) -> Share:
        """Return which part of a checkpoint key's tensor a tensor may hold."""
        regions = self.regions(tensor)
        return regions.share(View.of(tensor), key) if regions else Share()

    def _data(self, inputs: Iterable[Any]) -> dict[str, Share]:
        """Return the keys whose data these tensors hold, with the part of each."""
        found: dict[str, Share] = {}
        for tensor in inputs:
            gather(found, ((key, self.share(tensor, key)) for key in self.keys(tensor)))
        return found

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Take note of one operation that has just run."""
        self.operations += 1
        traits = _traits(func)
        if traits.view:
            return  # the same storage, which has its history
        written = tensors(args[at] if at < len(args) else kwargs.get(name) for at, name in traits.mutated)
        targets = {id(tensor) for tensor in written}
        inputs = [tensor for tensor in tensors((*args, *kwargs.values())) if id(tensor) not in targets]
        if len(written) == len(inputs) and traits.name.startswith("_foreach_"):
            for destination, source in zip(written, inputs, strict=True):
                self._write(traits.name, destination, self._data([source]), args)
            return
        data = self._data(inputs)
        if written:
            for destination in written:
                self._write(traits.name, destination, data, args)
        elif data:
            self._results(traits.name, inputs, data, tensors([out]))

    def _results(self, name: str, inputs: list[Any], data: dict[str, Share], results: list[Any]) -> None:
        if name in _SCALAR_READERS:
            self.read_as_values |= set(data)
        shared = {storage_id(tensor) for tensor in inputs}
        for result in results:
            if storage_id(result) not in shared:
                regions = self.regions(result, make=True)
                if regions is not None:
                    regions.write(View.of(result), frozenset(data))
                    regions.note(data)

    def _write(self, name: str, destination: Any, data: dict[str, Share], args: tuple[Any, ...]) -> None:
        regions = self.regions(destination, make=True)
        if regions is None:
            return
        view, keys = View.of(destination), frozenset(data)
        regions.note(data)
        if name in _PLACES:
            self._write_places(name, regions, destination, keys, args)
        elif name in _OVERWRITES or not name.endswith("_"):
            regions.write(view, keys)
        elif keys:
            regions.mix(view, keys)
            if name.startswith(("masked_", "scatter", "index_", "put_")):
                regions.inexact = True
                self.limits.add(f"{name} writes at places that were not followed: counts there are upper bounds")

    def _write_places(self, name: str, regions: Regions, destination: Any, keys: Keys, args: tuple[Any, ...]) -> None:
        mask = torch.zeros(destination.shape, dtype=torch.bool, device=destination.device)
        if name in {"index_copy_", "index_fill_"}:
            mask.index_fill_(args[1], args[2], value=True)
        else:
            mask.index_put_(tuple(args[1]), torch.tensor(data=True, device=mask.device))
        view = View.of(destination)
        flat = mask.flatten().cpu()
        if not flat.any():
            return
        if destination.is_contiguous():
            edges = (
                torch.diff(flat.to(torch.int8), prepend=flat.new_zeros(1).to(torch.int8)).nonzero().flatten().tolist()
            )
            edges = edges if len(edges) % 2 == 0 else [*edges, flat.numel()]
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                regions.write(View(view.offset + start, (end - start,), (1,), view.itemsize), keys)
        else:
            regions.inexact = True
            regions.write(view, keys)
            self.limits.add(f"{name} into a strided view was not followed: counts there are upper bounds")


class _Dispatch(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Sees every operation that reaches the dispatcher on this thread."""

    def __init__(self, lineage: Lineage) -> None:
        super().__init__()
        self._lineage = lineage

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        try:
            self._lineage.saw(func, args, kwargs or {}, out)
        except Exception as error:  # noqa: BLE001 -- the load must go on; the fault makes the evidence invalid
            self._lineage._fault(error)  # noqa: SLF001 -- one unit with Lineage
        return out


class _Function(TorchFunctionMode):  # type: ignore[misc]  # as above
    """Sees the calls by which Python code takes values out of a tensor without an operation."""

    def __init__(self, lineage: Lineage) -> None:
        super().__init__()
        self._lineage = lineage

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VALUE_READERS and args:
            try:
                self._lineage.read_as_values |= self._lineage.keys(args[0])
            except Exception as error:  # noqa: BLE001 -- as above
                self._lineage._fault(error)  # noqa: SLF001 -- as above
        return func(*args, **(kwargs or {}))
