"""The reference kernels that let SGLang run on a CPU, and whether an installed SGLang calls any that they lack.

`KERNELS` goes first on PYTHONPATH of an engine that is started on a CPU; what it holds, and why, is told in
sglang_cpu/sgl_kernel/__init__.py. `missing` reads an installation without importing it and says which kernels it wants
there and cannot have. What is wanted is decided by rule, so that a release nobody has looked at is judged like the rest:

1. The path starts at `_ROOTS`, the modules that the launch selects, and takes in every module of SGLang that one of them
   imports, directly or not, by an import at the left margin.
2. Code is read as it runs on a CPU without AMX: `if _is_cuda:` is skipped, what follows `if _is_cpu: return` as well.
3. What is imported or looked up while a module is being imported is wanted, whatever its name: without it the engine
   does not start.
4. What a function imports or looks up is wanted if its name ends in `_cpu`, and the function is under `if _is_cpu`, or in
   a module that rule 3 found to want kernels, or in a root or a module that a root imports. (Elsewhere are the functions
   for quantised weights, experts and images, which a dense model imports and never calls.)
5. What SGLang can do without is not wanted: a `try` that catches the failure and goes on, a `hasattr` that asks first.

A kernel that is there must also take the arguments it is given: a parameter more or less is how 0.5.19 differs from
0.5.20.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.errors import EnvironmentFault

__all__ = ["KERNELS", "Missing", "missing", "wanted"]

KERNELS = Path(__file__).with_name("sglang_cpu")
"""The folder for PYTHONPATH. It holds a package named `sgl_kernel` and nothing else."""

_ROOTS = (
    "sglang.srt.models.llama",
    "sglang.srt.models.llama_eagle3",
    "sglang.srt.layers.attention.intel_amx_backend",
    "sglang.srt.speculative.eagle_worker_v2",
)

# What SGLang's own questions are answered on a CPU whose `sgl_kernel` has no `convert_weight_packed`
# (srt/utils/common.py, 0.5.20 to 0.5.23). `_is_cpu = is_cpu()` and the like are followed.
_ANSWERS: Mapping[str, bool] = {
    "is_cpu": True,
    "cpu_has_amx_support": False,
    "use_intel_amx_backend": False,
    "TYPE_CHECKING": False,
} | dict.fromkeys(("is_cuda", "is_cuda_alike", "is_hip", "is_hpu", "is_mps", "is_musa", "is_npu", "is_xpu"), False)

_FALLBACKS = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}

_IMPORT = re.compile(r"^(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([\w., \t]+))", re.MULTILINE)
_NAMED = re.compile(r"(\w+)(?:[ \t]+as[ \t]+\w+)?[ \t]*(?:,|$|\))", re.MULTILINE)
_MENTIONS = re.compile(r"\b(?:from|import)[ \t]+sgl_kernel\b|\bops\.sgl_kernel\b")


@dataclasses.dataclass(frozen=True)
class Missing:
    """A kernel that SGLang wants and cannot have: its name, `file:line` in site-packages, and what is wrong."""

    name: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.where}): {self.why}"


@dataclasses.dataclass(frozen=True)
class _Use:
    """One place that wants a kernel."""

    name: str
    line: int
    at_import: bool
    for_cpu: bool


def missing(site_packages: Path, kernels: Path = KERNELS) -> tuple[Missing, ...]:
    """Return what the SGLang under `site_packages` wants of `kernels` and cannot have, sorted; empty if nothing.

    Takes about two seconds for the first call with a folder, most of it reading a thousand files.

    Raises:
        EnvironmentFault: there is no SGLang, it lacks a module that the path starts from, or nothing in it wants a
            kernel. Then nothing can be said.

    """
    have = _signatures(kernels)
    found = []
    for file, uses in _uses(site_packages).items():
        tree = _parsed(file)
        where = file.relative_to(site_packages)
        for use in uses:
            if use.name not in have:
                found.append(Missing(use.name, f"{where}:{use.line}", "not among the reference kernels"))
        for name, call in _calls(tree, {use.name for use in uses} & have.keys()):
            if why := _misfit(have[name], call):
                found.append(Missing(name, f"{where}:{call.lineno}", why))
    return tuple(sorted(found, key=lambda each: (each.name, each.where)))


def wanted(site_packages: Path) -> frozenset[str]:
    """Return the names of all kernels that the SGLang under `site_packages` wants. Raises as `missing` does."""
    return frozenset(use.name for uses in _uses(site_packages).values() for use in uses)


@functools.cache
def _uses(site_packages: Path) -> Mapping[Path, tuple[_Use, ...]]:
    """Return each file on the path that wants kernels, with the places."""
    modules = _path_of(site_packages)
    near = {each for root in _ROOTS for each in _imports(root, modules[root]) if each in modules} | set(_ROOTS)
    found: dict[Path, tuple[_Use, ...]] = {}
    for module, file in modules.items():
        if not _MENTIONS.search(_text(file)):
            continue
        uses = tuple(_Reader(_parsed(file)).uses())
        of_the_path = module in near or any(use.at_import for use in uses)
        kept = tuple(
            use for use in uses if use.at_import or (use.name.endswith("_cpu") and (of_the_path or use.for_cpu))
        )
        if kept:
            found[file] = kept
    if not found:
        raise EnvironmentFault(
            f"nothing in {site_packages / 'sglang'} calls a kernel on a CPU",
            remedy="this version's CPU path is not the one that draftgate knows (0.5.20 to 0.5.23)",
        )
    return found


# ------------------------------------------------------------------------------------------------- modules of the path


def _path_of(site_packages: Path) -> dict[str, Path]:
    """Return the modules that Python imports along with `_ROOTS`, each with its file."""
    found: dict[str, Path] = {}
    todo = list(_ROOTS)
    seen = set(todo)
    while todo:
        module = todo.pop()
        file = _file_of(module, site_packages)
        if file is None:
            if module in _ROOTS:
                raise EnvironmentFault(
                    f"{site_packages} has no {module}",
                    remedy="the reference kernels serve SGLang 0.5.20 to 0.5.23: install one of those (--engine-env)",
                )
            continue  # a name that is no module
        found[module] = file
        parts = module.split(".")
        parents = {".".join(parts[:length]) for length in range(1, len(parts))}
        new = (parents | _imports(module, file)) - seen
        seen |= new
        todo += sorted(new)
    return found


def _file_of(module: str, site_packages: Path) -> Path | None:
    place = site_packages.joinpath(*module.split("."))
    for file in (place / "__init__.py", place.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def _imports(module: str, file: Path) -> set[str]:
    """Return what `file` imports of SGLang at the left margin. Not every name is a module."""
    package = module.split(".")
    if file.name != "__init__.py":
        package.pop()
    found = set()
    for source, names, plain in _IMPORT.findall(_text(file)):
        if plain:
            found |= {each.split()[0] for each in plain.split(",") if each.split()}
            continue
        stripped = source.lstrip(".")
        level = len(source) - len(stripped)
        parts = package[: len(package) - level + 1] if level else []
        origin = ".".join([*parts, stripped] if stripped else parts)
        found |= {origin, *(f"{origin}.{name}" for name in _NAMED.findall(re.sub(r"#.*", "", names)))}
    return {each for each in found if each.partition(".")[0] == "sglang"}


@functools.cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@functools.cache
def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(_text(file))
    except SyntaxError as error:
        raise EnvironmentFault(
            f"{file} cannot be parsed: {error}", remedy="run draftgate under the Python of the engine's environment, or newer"
        ) from error


# --------------------------------------------------------------------------------------------------- one module's uses


class _Reader:
    """Reads one module as it runs on a CPU."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.names: dict[str, bool | None] = {}
        self.found: list[_Use] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name, answer = node.targets[0].id, self.answer(node.value)
                self.names[name] = answer if self.names.get(name, answer) == answer else None

    def uses(self) -> list[_Use]:
        """Return every place that wants a kernel and is reached."""
        self.block(self.tree.body, at_import=True, for_cpu=False)
        return self.found

    def answer(self, test: ast.expr) -> bool | None:
        """Return what `test` is on a CPU, None if that is not known."""
        match test:
            case ast.Constant(value=bool() as value):
                return value
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.answer(operand)
                return None if inner is None else not inner
            case ast.BoolOp(op=op, values=values):
                answers = [self.answer(value) for value in values]
                decisive = isinstance(op, ast.Or)
                return decisive if decisive in answers else None if None in answers else not decisive
            case ast.Call(func=ast.Name(id="hasattr"), args=[ast.Attribute(attr="sgl_kernel"), *_]):
                return False
            case ast.Call(func=func):
                return self.answer(func)
            case ast.Attribute(attr=name):
                return _ANSWERS.get(name)
            case ast.Name(id=name):
                return self.names[name] if name in self.names else _ANSWERS.get(name.lstrip("_"))
        return None

    def block(self, body: list[ast.stmt], *, at_import: bool, for_cpu: bool) -> bool:
        """Read statements in turn; return whether control never gets past them."""
        return any(self.statement(each, at_import=at_import, for_cpu=for_cpu) for each in body)

    def statement(self, node: ast.stmt, *, at_import: bool, for_cpu: bool) -> bool:
        """Read one statement; return whether control never gets past it."""
        match node:
            case ast.If(test=test):
                answer = self.answer(test)
                self.expression(test, at_import=at_import, for_cpu=for_cpu)
                asks = answer is True and any(
                    self.answer(each) is True and isinstance(each, ast.Name | ast.Call) for each in ast.walk(test)
                    if isinstance(each, ast.expr)
                )
                ends = [
                    self.block(branch, at_import=at_import, for_cpu=for_cpu or (asks and branch is node.body))
                    for branch, taken in ((node.body, answer is not False), (node.orelse, answer is not True))
                    if taken
                ]
                return all(ends)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.block(node.body, at_import=False, for_cpu=for_cpu)
            case ast.ClassDef():
                self.block(node.body, at_import=at_import, for_cpu=for_cpu)
            case ast.Try():
                if not any(_goes_on(handler) for handler in node.handlers):
                    self.block(node.body, at_import=at_import, for_cpu=for_cpu)
                for branch in (*(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                    self.block(branch, at_import=at_import, for_cpu=for_cpu)
            case ast.With(body=body) | ast.AsyncWith(body=body):
                return self.block(body, at_import=at_import, for_cpu=for_cpu)
            case ast.For(body=body) | ast.AsyncFor(body=body) | ast.While(body=body):
                self.block([*body, *node.orelse], at_import=at_import, for_cpu=for_cpu)
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] == "sgl_kernel":
                prefix = module.removeprefix("sgl_kernel").removeprefix(".")
                for alias in node.names:
                    name = f"{prefix}.{alias.name}" if prefix else alias.name
                    self.found.append(_Use(name, node.lineno, at_import, for_cpu))
            case ast.Import():
                for alias in node.names:
                    if alias.name.startswith("sgl_kernel."):
                        name = alias.name.removeprefix("sgl_kernel.")
                        self.found.append(_Use(name, node.lineno, at_import, for_cpu))
            case _:
                self.expression(node, at_import=at_import, for_cpu=for_cpu)
                return isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)
        return False

    def expression(self, node: ast.AST, *, at_import: bool, for_cpu: bool) -> None:
        """Note every `torch.ops.sgl_kernel.NAME` in `node`."""
        if isinstance(node, ast.IfExp) and (answer := self.answer(node.test)) is not None:
            node = node.body if answer else node.orelse
        match node:
            case ast.Attribute(attr=name, value=ast.Attribute(attr="sgl_kernel", value=ast.Attribute(attr="ops"))):
                self.found.append(_Use(name, node.lineno, at_import, for_cpu))
        for child in ast.iter_child_nodes(node):
            self.expression(child, at_import=at_import and not isinstance(node, ast.Lambda), for_cpu=for_cpu)


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Return whether `handler` catches the failure of an import or a look-up, and does not raise in turn."""
    if handler.type is not None:
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if not any(isinstance(each, ast.Name) and each.id in _FALLBACKS for each in caught):
            return False
    return not isinstance(handler.body[-1], ast.Raise)


# ---------------------------------------------------------------------------------------------------------- signatures


def _signatures(kernels: Path) -> dict[str, ast.arguments]:
    """Return what can be imported from the package under `kernels`, or looked up in torch.ops, with its parameters."""
    trees = [_parsed(file) for file in sorted(kernels.glob("sgl_kernel/*.py"))]
    functions = {node.name: node.args for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    offered: set[str] = set()
    for node in _parsed(kernels / "sgl_kernel" / "__init__.py").body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                offered |= set(ast.literal_eval(value))
            case ast.Assign(targets=[ast.Attribute(attr=name, value=ast.Attribute(attr="sgl_kernel"))]):
                offered.add(name)
    return {name: functions[name] for name in offered}


def _calls(tree: ast.Module, names: set[str]) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of kernels in a module, also under another name or through an attribute that holds the kernel."""
    called = {name: name for name in names}
    for node in ast.walk(tree):
        match node:
            case ast.alias(name=name, asname=str(other)) if name in names:
                called[other] = name
            case ast.Assign(
                targets=[ast.Attribute(attr=other) | ast.Name(id=other)],
                value=ast.Attribute(attr=name) | ast.Name(id=name),
            ) if name in names:
                called[other] = name
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in called:
                yield called[name], node


def _misfit(parameters: ast.arguments, call: ast.Call) -> str:
    """Return "" if `call` fits the parameters, else how it does not."""
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return ""  # how many there are is not known here
    known = [each.arg for each in parameters.args]
    given = [*known[: len(call.args)], *(each.arg for each in call.keywords if each.arg)]
    required = set(known[: len(known) - len(parameters.defaults)])
    count = len(call.args) + len(call.keywords)
    if len(call.args) > len(known):
        return f"called with {count} arguments, the reference kernel takes {len(known)}"
    if unknown := sorted(set(given) - set(known)):
        return f"called with {', '.join(unknown)}, which the reference kernel does not take"
    if absent := sorted(required - set(given)):
        return f"called with {count} arguments, without {', '.join(absent)} of the reference kernel"
    return ""
