"""Stand-ins for compiled kernel packages, which importing an engine asks for and loading weights does not need.

A stand-in that takes part in building a model or loading it would make a false contract. So each one reports it when it
is called, instantiated or tested, and `in_tree` looks for them in the finished model.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

touched: list[str] = []
"""Stand-ins that were called, instantiated or tested since the list was last emptied."""


class _Meta(type):
    """Classes that answer any attribute with another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(f"{cls.__name__}.{name}")

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Stub(metaclass=_Meta):
    """Every stand-in is a class derived from this one, or an instance of one."""

    def __new__(cls, *args: Any, **_: Any) -> Any:  # noqa: D102 -- the class says it
        touched.append(cls.__name__)
        decorated = args[0] if len(args) == 1 and callable(args[0]) else None
        return decorated if isinstance(decorated, types.FunctionType) else object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(f"{type(self).__name__}.{name}")

    def __call__(self, *args: Any, **_: Any) -> Any:  # noqa: D102 -- as above
        touched.append(type(self).__name__)
        return args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType) else self

    def __bool__(self) -> bool:
        touched.append(type(self).__name__)
        return False

    def __getitem__(self, key: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def make(name: str) -> Any:
    """Return a new stand-in of this dotted name."""
    return _Meta(name, (Stub,), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "999.0.0"  # engines ask for a least version
        if name.startswith("__"):
            raise AttributeError(name)
        return make(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of `stubbed` packages with stand-ins, and says that `blocked` ones are not there."""

    def __init__(self, stubbed: Sequence[str], blocked: Sequence[str]) -> None:
        self._stubbed = stubbed
        self._blocked = blocked

    def install(self) -> None:
        """Come before every other finder."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> Any:
        """See importlib."""
        if _under(name, self._blocked):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if _under(name, self._stubbed) else None

    def create_module(self, spec: Any) -> Any:
        """See importlib."""
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        """See importlib."""


def _under(name: str, tops: Sequence[str]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def is_stub(value: object) -> bool:
    """Say whether a value is a stand-in, or a class or an object derived from one."""
    return isinstance(value, (Stub, _Module)) or (isinstance(value, type) and issubclass(value, Stub))


def in_tree(model: Any) -> list[str]:
    """Return where stand-ins sit in a model: its modules, their attributes, the loaders of its parameters."""
    found = []
    for name, module in model.named_modules():
        if is_stub(module):
            found.append(f"{name} is a {type(module).__name__}")
        held = {**vars(module), **module._modules}  # noqa: SLF001 -- torch has no other way to see empty slots
        found += [f"{name}.{key} is {value!r}" for key, value in held.items() if is_stub(value)]
    for name, parameter in model.named_parameters():
        if is_stub(getattr(parameter, "weight_loader", None)):
            found.append(f"the loader of {name}")
    return sorted(found)
