"""The reference kernels that let SGLang run on a CPU, and whether an installed SGLang calls any that they lack.

`FOLDER` goes first on PYTHONPATH of an engine that is started on a CPU; what it holds, and why, is told in
sglang_cpu/sgl_kernel/__init__.py. `missing` reads an installation without importing it and says which kernels it wants
there and cannot have. What is wanted is decided by rule, so that a release nobody has looked at is judged like others:

1. The path starts at `_ROOTS`, the modules that the launch selects, and takes in every module of SGLang that one of
   them imports, directly or not, by an import at the left margin.
2. Code is read as it runs on a CPU without AMX: `if _is_cuda:` is skipped, what follows `if _is_cpu: return` as well.
3. What is imported or looked up while a module is being imported is wanted, whatever its name: without it the engine
   does not start.
4. What a function imports or looks up is wanted if its name ends in `_cpu`, and it is under `if _is_cpu`, or in a
   module that rule 3 found to want kernels, or in a root or a module that a root imports. (Elsewhere are the functions
   for quantised weights, experts and images, which a dense model imports and never calls.)
5. What SGLang can do without is not wanted: a `try` that catches the failure and goes on, a `hasattr` that asks first.

A kernel that is there must also take the arguments that it is given: 0.5.19 passes attention two fewer than 0.5.20.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from harness.errors import EnvironmentFault

__all__ = ["FOLDER", "missing"]

FOLDER = Path(__file__).with_name("sglang_cpu")
"""The folder for PYTHONPATH. It holds a package named `sgl_kernel` and nothing else."""

_ROOTS = (
    "sglang.srt.models.llama",
    "sglang.srt.models.llama_eagle3",
    "sglang.srt.layers.attention.intel_amx_backend",
    "sglang.srt.speculative.eagle_worker_v2",
)

# How SGLang's own questions are answered on a CPU whose `sgl_kernel` has no `convert_weight_packed`
# (srt/utils/common.py, 0.5.20 to 0.5.23). `_is_cpu = is_cpu()` and the like are followed.
_ANSWERS: Mapping[str, bool] = {
    "is_cpu": True,
    "cpu_has_amx_support": False,
    "use_intel_amx_backend": False,
    "TYPE_CHECKING": False,
} | dict.fromkeys(("is_cuda", "is_cuda_alike", "is_hip", "is_hpu", "is_mps", "is_musa", "is_npu", "is_xpu"), False)

_FALLBACKS = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}

# Regular expressions, because parsing a thousand files would take ten seconds.
_IMPORT = re.compile(
    r"^(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
_NAMED = re.compile(r"(\w+)(?:[ \t]+as[ \t]+\w+)?[ \t]*(?:,|$|\))", re.MULTILINE)
_MENTIONS = re.compile(r"\b(?:from|import)[ \t]+sgl_kernel\b|\bops\.sgl_kernel\b")


def missing(site_packages: Path, kernels: Path = FOLDER) -> dict[str, str]:
    """Return what the SGLang under `site_packages` wants of the package under `kernels` and cannot have.

    Maps each name to where it is wanted (`file:line`, and how the call does not fit if that is what is wrong); empty if
    nothing is missing. Takes about two seconds, most of them to read a thousand files.

    Raises:
        EnvironmentFault: there is no SGLang, it lacks a module that the path starts from, a file cannot be parsed, or
            nothing in it wants a kernel. Then nothing can be said.

    """
    have = _signatures(kernels)
    modules = _modules(site_packages)
    near = set(_ROOTS).union(*(modules[root].imports for root in _ROOTS))
    found: dict[str, str] = {}
    seen = False
    for name, module in sorted(modules.items()):
        if not module.mentions:
            continue
        tree = _parsed(module.file)
        reader = _Reader(module.file.read_text(encoding="utf-8", errors="replace"))
        reader.visit(tree)
        of_the_path = name in near or any(use.at_import for use in reader.found)
        where = module.file.relative_to(site_packages)
        kept: dict[str, _Use] = {}
        for use in reader.found:
            if use.at_import or (use.kernel.endswith("_cpu") and (of_the_path or use.for_cpu)):
                kept.setdefault(use.kernel, use)
        seen = seen or bool(kept)
        for kernel, use in kept.items():
            if kernel not in have:
                found.setdefault(kernel, f"{where}:{use.line}")
        for kernel, call in _calls(tree, kept.keys() & have.keys()):
            if why := _misfit(have[kernel], call):
                found.setdefault(kernel, f"{where}:{call.lineno}, {why}")
    if not seen:
        raise EnvironmentFault(
            f"nothing in {site_packages / 'sglang'} calls a kernel on a CPU",
            remedy="its CPU path is not the one that the reference kernels serve (SGLang 0.5.20 to 0.5.23)",
        )
    return found


# ------------------------------------------------------------------------------------------------- modules of the path


@dataclasses.dataclass(frozen=True)
class _Module:
    """A module's file, what it imports of SGLang at the left margin, and whether it speaks of kernels."""

    file: Path
    imports: frozenset[str]
    mentions: bool


def _modules(site_packages: Path) -> dict[str, _Module]:
    """Return the modules that Python imports along with `_ROOTS`."""
    found: dict[str, _Module] = {}
    todo = set(_ROOTS)
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        seen.add(name)
        file = _file_of(name, site_packages)
        if file is None:
            if name in _ROOTS:
                raise EnvironmentFault(
                    f"{site_packages} has no {name}",
                    remedy="the reference kernels serve SGLang 0.5.20 to 0.5.23: install one of those (--engine-env)",
                )
            continue  # a name that is no module
        text = file.read_text(encoding="utf-8", errors="replace")
        found[name] = _Module(file, frozenset(_imports(name, file, text)), bool(_MENTIONS.search(text)))
        parts = name.split(".")
        todo |= ({".".join(parts[:length]) for length in range(1, len(parts))} | found[name].imports) - seen
    return found


def _file_of(module: str, site_packages: Path) -> Path | None:
    place = site_packages.joinpath(*module.split("."))
    return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


def _imports(module: str, file: Path, text: str) -> set[str]:
    """Return what a module imports of SGLang at the left margin. Not every name is a module."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for source, names, plain in _IMPORT.findall(text):
        if plain:
            found |= {each.split()[0] for each in plain.split(",") if each.split()}
            continue
        stripped = source.lstrip(".")
        level = len(source) - len(stripped)
        parents = package[: len(package) - level + 1] if level else []
        origin = ".".join([*parents, stripped] if stripped else parents)
        found |= {origin, *(f"{origin}.{name}" for name in _NAMED.findall(re.sub(r"#.*", "", names)))}
    return {each for each in found if each.partition(".")[0] == "sglang"}


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise EnvironmentFault(
            f"{file} cannot be parsed: {error}",
            remedy="run draftgate under the engine's version of Python, or a newer one",
        ) from error


# --------------------------------------------------------------------------------------------------- one module's uses


@dataclasses.dataclass(frozen=True)
class _Use:
    """A line that imports a kernel or looks one up, whether it runs when the module is imported, and under `is_cpu`."""

    kernel: str
    line: int
    at_import: bool
    for_cpu: bool


class _Reader(ast.NodeVisitor):
    """Reads one module as it runs on a CPU. Each visit of a statement returns whether control never gets past it."""

    def __init__(self, text: str) -> None:
        self.speaking = [number for number, line in enumerate(text.splitlines(), 1) if "sgl_kernel" in line]
        self.names: dict[str, bool | None] = {}
        self.found: list[_Use] = []
        self.at_import = True
        self.for_cpu = False

    def block(self, body: Iterable[ast.stmt]) -> bool:
        """Read statements in turn, up to one that control never gets past; return whether there is one."""
        return any(self.visit(each) for each in body)

    def visit_Module(self, node: ast.Module) -> bool:
        return self.block(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        before, self.at_import = self.at_import, False
        self.block(node.body)
        self.at_import = before
        return False

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 -- the name is NodeVisitor's

    def visit_ClassDef(self, node: ast.ClassDef) -> bool:
        self.block(node.body)
        return False

    def visit_If(self, node: ast.If) -> bool:
        self.expression(node.test)
        answer = self.answer(node.test)
        ends = []
        if answer is not False:
            before = self.for_cpu
            self.for_cpu |= bool(answer) and any(_name(each).lstrip("_") == "is_cpu" for each in ast.walk(node.test))
            ends.append(self.block(node.body))
            self.for_cpu = before
        if answer is not True:
            ends.append(self.block(node.orelse))
        return all(ends)

    def visit_Try(self, node: ast.Try) -> bool:
        if not any(_goes_on(handler) for handler in node.handlers):
            self.block(node.body)
        for body in (*(handler.body for handler in node.handlers), node.orelse, node.finalbody):
            self.block(body)
        return False

    def visit_ImportFrom(self, node: ast.ImportFrom) -> bool:
        package, _, module = (node.module or "").partition(".")
        if package == "sgl_kernel" and not node.level:
            for alias in node.names:
                self.note(f"{module}.{alias.name}" if module else alias.name, node)
        return False

    def visit_Import(self, node: ast.Import) -> bool:
        for alias in node.names:
            package, _, module = alias.name.partition(".")
            if package == "sgl_kernel" and module:
                self.note(module, node)
        return False

    def visit_Assign(self, node: ast.Assign) -> bool:
        match node.targets:
            case [ast.Name(id=name)] if self.at_import:
                answer = self.answer(node.value)
                self.names[name] = answer if self.names.get(name, answer) == answer else None
        self.expression(node)
        return False

    def generic_visit(self, node: ast.AST) -> bool:
        blocks = [block for field in ("body", "orelse") if (block := getattr(node, field, None))]
        for block in blocks:  # of a loop, or of a `with`
            self.block(block)
        if not blocks and isinstance(node, ast.stmt):
            self.expression(node)
        return isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)

    def expression(self, node: ast.stmt | ast.expr) -> None:
        """Note every `torch.ops.sgl_kernel.NAME` in `node`."""
        if not any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in self.speaking):
            return
        todo: list[ast.AST] = [node]
        while todo:
            each = todo.pop()
            match each:
                case ast.IfExp(test=test, body=body, orelse=orelse) if (answer := self.answer(test)) is not None:
                    todo.append(body if answer else orelse)
                    continue
                case ast.Attribute(attr=name, value=ast.Attribute(attr="sgl_kernel", value=ast.Attribute(attr="ops"))):
                    self.note(name, each)
            todo += ast.iter_child_nodes(each)

    def note(self, kernel: str, node: ast.stmt | ast.expr) -> None:
        """Remember that `node` wants `kernel`."""
        self.found.append(_Use(kernel, node.lineno, self.at_import, self.for_cpu))

    def answer(self, test: ast.expr) -> bool | None:
        """Return what `test` is on a CPU, None if that is not known."""
        found: bool | None = None
        match test:
            case ast.Constant(value=bool() as value):
                found = value
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.answer(operand)
                found = None if inner is None else not inner
            case ast.BoolOp(op=op, values=values):
                answers = [self.answer(value) for value in values]
                decisive = isinstance(op, ast.Or)
                found = decisive if decisive in answers else None if None in answers else not decisive
            case ast.Call(func=ast.Name(id="hasattr"), args=[ast.Attribute(attr="sgl_kernel"), *_]):
                found = False
            case ast.Call(func=func):
                found = self.answer(func)
            case ast.Attribute(attr=name):
                found = _ANSWERS.get(name)
            case ast.Name(id=name):
                found = self.names[name] if name in self.names else _ANSWERS.get(name.lstrip("_"))
        return found


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


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
    trees = {file.name: _parsed(file) for file in kernels.glob("sgl_kernel/*.py")}
    functions = {
        node.name: node.args for tree in trees.values() for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    offered: set[str] = set()
    for node in trees["__init__.py"].body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                offered |= set(ast.literal_eval(value))
            case ast.Assign(targets=[ast.Attribute(attr=name, value=ast.Attribute(attr="sgl_kernel"))]):
                offered.add(name)
    return {name: functions[name] for name in offered}


def _calls(tree: ast.Module, names: AbstractSet[str]) -> Iterator[tuple[str, ast.Call]]:
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
    count = len(call.args) + len(call.keywords)
    if not len(known) - len(parameters.defaults) <= count <= len(known):
        return f"with {count} arguments, the reference kernel takes {len(known)}"
    if strange := sorted({each.arg for each in call.keywords if each.arg} - set(known[len(call.args) :])):
        return f"with {', '.join(strange)}, which the reference kernel does not take"
    return ""
