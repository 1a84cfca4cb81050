"""Reading pair definitions, and refusing the wrong ones before anything starts."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import PairError
from harness.pairs.model import EngineLaunch, Expectations, Pair, Workload

if TYPE_CHECKING:
    from harness.canary.spec import CanarySpec

__all__ = ["ENGINES", "METHODS", "SHIPPED_FILE", "adhoc", "find", "read_file"]

SHIPPED_FILE = Path(__file__).with_name("pairs.toml")
METHODS = ("eagle3",)
DTYPES = ("bfloat16", "float16", "float32")
ENGINES = {"vllm": ("v1", "v2"), "sglang": ("sync", "overlap")}
"""The engines known, and the model runners each can be asked for."""

_VARIABLE = re.compile(r"\$\{(\w+)\}")
"""An environment variable in a path: `${NAME}`."""

_PAIR_KEYS = {
    "method",
    "k",
    "dtype",
    "target",
    "drafter",
    "canary",
    "rebuild",
    "accept",
    "side_by_side",
    "expect",
    "workload",
    "engine",
}
_EXPECT_KEYS = {"aux_hidden_dim", "aux_layers", "accept_length", "throughput_ratio", "startup_s"}
_WORKLOAD_KEYS = {
    "prompts_file",
    "count",
    "length",
    "max_tokens",
    "throughput_count",
    "throughput_tokens",
    "rounds",
    "seed",
}
_ENGINE_KEYS = {"args", "env", "runners"}


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class _Table:
    """One TOML table with its place in the file, so that every refusal can name file and key."""

    def __init__(self, source: str, where: str, data: Any, known: Iterable[str]) -> None:
        self.source, self.where = source, where
        if not isinstance(data, Mapping):
            raise self.error("", f"is {_kind(data)}, not a table")
        self.data: Mapping[str, Any] = data
        names = sorted(known)
        for key in data:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                remedy = f"write {near[0]!r}" if near else f"known keys: {', '.join(names)}"
                raise self.error(key, "is not a known key", remedy)

    def error(self, key: str, problem: str, remedy: str = "") -> PairError:
        place = f"{self.where}.{key}" if key else self.where
        return PairError(f"{self.source}: {place} {problem}", remedy=remedy)

    def get(self, key: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of one of `kinds`; TOML's booleans are not numbers here."""
        if key not in self.data:
            return default
        value = self.data[key]
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join(kind.__name__ for kind in wanted)
            raise self.error(key, f"is {_kind(value)}, expected {names}")
        return value

    def positive(self, key: str, default: int) -> int:
        value: int = self.get(key, int, default)
        if value < 1:
            raise self.error(key, f"is {value}; it counts something and must be at least 1")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.get(key, list, [])
        if not all(isinstance(item, str) for item in value):
            raise self.error(
                key, "must be a list of strings", 'write numbers as strings too: ["--max-model-len", "512"]'
            )
        return tuple(value)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


def read_file(path: Path) -> dict[str, Pair]:
    """Return the pairs a TOML file defines, by name.

    Raises:
        PairError: the file cannot be read or parsed; a key is unknown or of the wrong type; a path is missing; an
            expectation can never be met.

    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PairError(f"{path}: no such pairs file", remedy="give --pairs-file an existing TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PairError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise PairError(f"{path}: not valid TOML: {error}") from error
    top = _Table(str(path), "file", data, {"pairs"})
    pairs = top.get("pairs", dict, {})
    if not pairs:
        raise top.error("", "defines no pairs", "add a table [pairs.NAME]")
    for name in pairs:
        if _NAME.fullmatch(name) is None:
            raise PairError(
                f"{path}: {name!r} cannot be a pair's name: a folder and a test are named by it",
                remedy="begin with a letter or a digit, and use letters, digits, '.', '_', '+' and '-'",
            )
    return {name: _pair(name, str(path), path.parent, table) for name, table in pairs.items()}


def find(names: Iterable[str], files: Iterable[Path] = ()) -> list[Pair]:
    """Return the named pairs, looked up in `files` and then among the shipped ones.

    Raises:
        PairError: a name is unknown, or two files define it.

    """
    known: dict[str, Pair] = {}
    for path in (*files, SHIPPED_FILE):
        for name, pair in read_file(path).items():
            if name in known:
                raise PairError(
                    f"{path}: pair {name!r} is already defined in {known[name].source}",
                    remedy="give one of them another name",
                )
            known[name] = pair
    found = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PairError(f"no pair is named {name!r}", remedy=f"{hint}known: {', '.join(sorted(known))}")
        if missing := known[name].unset:
            raise PairError(
                f"{known[name].source}: pairs.{name} names its checkpoints by variables that are not set: "
                f"{', '.join(missing)}",
                remedy=f"export {missing[0]}=/path/to/checkpoint",
            )
        found.append(known[name])
    return found


def adhoc(target: Path, drafter: Path, *, k: int, dtype: str, method: str = "eagle3") -> Pair:
    """Return a pair made from two folders on the command line. It promises that speculation pays at concurrency 1.

    Raises:
        PairError: a folder is missing, or the two cannot belong together.

    """
    table = {"target": str(target), "drafter": str(drafter), "k": k, "dtype": dtype, "method": method}
    table["expect"] = {"throughput_ratio": {"1": 1.0}, "accept_length": 1.2}
    table["workload"] = {"count": 18}
    name = re.sub(r"[^A-Za-z0-9._+-]", "_", f"{target.absolute().name}+{drafter.absolute().name}").lstrip("._+-")
    return _pair(name or "pair", "command line", Path.cwd(), table)


def _pair(name: str, source: str, base: Path, data: Any) -> Pair:
    table = _Table(source, f"pairs.{name}", data, _PAIR_KEYS)
    method = table.get("method", str, "eagle3")
    if method not in METHODS:
        raise table.error("method", f"is {method!r}", f"known methods: {', '.join(METHODS)}")
    k = table.get("k", int, 4)
    if not 1 <= k <= 32:
        raise table.error("k", f"is {k}", "the number of draft tokens is between 1 and 32")
    paths = {key: _folder(table, base, key) for key in ("target", "drafter", "rebuild")}
    canary = table.get("canary", str)
    ways = [key for key in ("canary", "rebuild", "target") if key in table.data]
    alone = {"canary": True, "rebuild": "drafter" not in table.data, "target": "drafter" in table.data}
    if len(ways) != 1 or not alone[ways[0]]:
        raise table.error(
            "",
            "must say where its checkpoints are, in one way",
            "canary (a drafter beside it replaces the built one), or rebuild, or target and drafter",
        )
    spec = None if canary is None else _canary(table, canary)
    dtype = table.get("dtype", str, "bfloat16" if spec is None else spec.dtype)
    if dtype not in DTYPES:
        raise table.error("dtype", f"is {dtype!r}", f"one of: {', '.join(DTYPES)}")
    pair = Pair(
        name=name,
        source=source,
        method=method,
        k=k,
        dtype=dtype,
        canary=canary,
        accept=table.strings("accept"),
        target=paths["target"],
        drafter=paths["drafter"],
        rebuild=paths["rebuild"],
        expect=_expect(table, k, canary=canary),
        workload=_workload(table, base),
        engines=_engines(table),
        side_by_side=table.get("side_by_side", bool, True),
        unset=tuple(name for key in paths for name in _unset(table.data.get(key, ""))),
    )
    if pair.target is not None and pair.drafter is not None:
        _fits(table, pair)
    return pair


def _unset(value: Any) -> list[str]:
    return [name for name in _VARIABLE.findall(str(value)) if not os.environ.get(name)]


def _folder(table: _Table, base: Path, key: str) -> Path | None:
    value = table.get(key, str)
    if value is None or _unset(value):
        return None
    value = _VARIABLE.sub(lambda match: os.environ[match[1]], value)
    path = (base / Path(value).expanduser()).resolve()
    if not (path / "config.json").is_file():
        what = "no such folder" if not path.exists() else "no config.json in it"
        raise table.error(
            key, f"is {value!r}: {what} ({path})", "name a local checkpoint folder; hubs are not contacted"
        )
    return path


def _canary(table: _Table, name: str) -> CanarySpec:
    from harness.canary.spec import SHIPPED  # noqa: PLC0415 -- only pairs files that use canaries need it

    if name not in SHIPPED:
        raise table.error("canary", f"is {name!r}", f"known canaries: {', '.join(sorted(SHIPPED))}")
    if "accept_length" in table.data.get("expect", {}):
        raise table.error(
            "expect.accept_length", "is set for a canary", "leave it out: canaries are judged by equality"
        )
    return SHIPPED[name]


def _expect(parent: _Table, k: int, *, canary: str | None) -> Expectations:
    table = _Table(parent.source, f"{parent.where}.expect", parent.data.get("expect", {}), _EXPECT_KEYS)
    accept = table.get("accept_length", (int, float))
    if accept is not None and not 1 < accept <= k + 1:
        raise table.error(
            "accept_length", f"is {accept}, impossible with k = {k}", f"it lies above 1 and at most {k + 1}"
        )
    width = table.get("aux_hidden_dim", int)
    if width is not None and width < 1:
        raise table.error("aux_hidden_dim", f"is {width}", "n_aux x the target's hidden size, e.g. 21504")
    layers = table.get("aux_layers", list)
    if layers is not None and (
        not layers or not all(isinstance(item, int) and item >= 0 for item in layers) or sorted(set(layers)) != layers
    ):
        raise table.error(
            "aux_layers", f"is {layers}", "ascending layer numbers, e.g. [2, 30, 58]: the inputs of these layers"
        )
    if width is not None and layers is not None and width % len(layers):
        raise table.error("aux_hidden_dim", f"is {width}, which {len(layers)} aux_layers do not divide")
    if canary is not None:
        _canary_expectation(table, canary, width, layers)
    startup = float(table.get("startup_s", (int, float), Expectations.startup_s))
    if startup <= 0:
        raise table.error("startup_s", f"is {startup}", "seconds, above 0")
    ratios: dict[int, float] = {}
    for key, value in table.get("throughput_ratio", dict, {}).items():
        if not key.isdigit() or int(key) < 1:
            raise table.error(f"throughput_ratio.{key}", "is not a concurrency", 'write e.g. { "1" = 1.2, "8" = 1.0 }')
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= k + 1:
            raise table.error(
                f"throughput_ratio.{key}",
                f"is {value!r}, impossible with k = {k}",
                f"above 0 and at most k + 1 = {k + 1}: no step yields more tokens than that",
            )
        ratios[int(key)] = float(value)
    return Expectations(
        aux_hidden_dim=width,
        aux_layers=None if layers is None else tuple(layers),
        accept_length=None if accept is None else float(accept),
        throughput_ratio=ratios,
        startup_s=startup,
    )


def _canary_expectation(table: _Table, name: str, width: int | None, layers: list[int] | None) -> None:
    """Refuse a promise that the canary's own arithmetic contradicts."""
    from harness.canary.spec import SHIPPED  # noqa: PLC0415 -- only pairs files that use canaries need it

    spec = SHIPPED[name]
    true_width = 3 * spec.hidden
    if width is not None and width != true_width:
        raise table.error(
            "aux_hidden_dim", f"is {width}, but canary {name!r} has 3 x {spec.hidden}", f"write {true_width}"
        )
    if layers is not None and tuple(layers) != spec.aux:
        raise table.error("aux_layers", f"is {layers}, but canary {name!r} was built on {list(spec.aux)}")


def _workload(parent: _Table, base: Path) -> Workload:
    table = _Table(parent.source, f"{parent.where}.workload", parent.data.get("workload", {}), _WORKLOAD_KEYS)
    value = table.get("prompts_file", str)
    path = None
    if value is not None:
        path = (base / Path(value).expanduser()).resolve()
        if not path.is_file():
            raise table.error("prompts_file", f"is {value!r}: no such file ({path})")
    defaults = Workload()
    if table.positive("rounds", defaults.rounds) % 2:
        raise table.error("rounds", f"is {table.data['rounds']}", "an even number: rounds are interleaved A B B A")
    if table.positive("max_tokens", defaults.max_tokens) < 2:
        raise table.error(
            "max_tokens", "is 1", "2 or more: the first token comes from prefill, so nothing would be drafted"
        )
    return Workload(
        prompts_file=path,
        seed=table.get("seed", int, defaults.seed),
        **{
            key: table.positive(key, getattr(defaults, key))
            for key in ("count", "length", "max_tokens", "throughput_count", "throughput_tokens", "rounds")
        },
    )


def _engines(parent: _Table) -> dict[str, EngineLaunch]:
    launches = {}
    for engine, data in parent.get("engine", dict, {}).items():
        if engine not in ENGINES:
            raise parent.error(f"engine.{engine}", "is not a known engine", f"known: {', '.join(ENGINES)}")
        table = _Table(parent.source, f"{parent.where}.engine.{engine}", data, _ENGINE_KEYS)
        env = table.get("env", dict, {})
        if not all(isinstance(value, str) for value in env.values()):
            raise table.error("env", "must map names to strings")
        runners = table.strings("runners")
        for runner in runners:
            if runner not in ENGINES[engine]:
                raise table.error("runners", f"names {runner!r}", f"known: {', '.join(ENGINES[engine])}")
        launches[engine] = EngineLaunch(table.strings("args"), tuple(sorted(env.items())), runners)
    return launches


def _fits(table: _Table, pair: Pair) -> None:
    """Refuse two folders that cannot belong together, and promises that the target's config contradicts."""
    target, drafter = (
        _config(table, key, folder) for key, folder in (("target", pair.target), ("drafter", pair.drafter))
    )
    body = drafter.get("transformer_layer_config") or drafter
    text = target.get("text_config") or target
    hidden, vocab = text.get("hidden_size"), text.get("vocab_size")
    if misfit := pair.expect.misfit(hidden):
        raise table.error("expect.aux_hidden_dim", *misfit)
    depth, layers = text.get("num_hidden_layers"), pair.expect.aux_layers
    if layers is not None and isinstance(depth, int) and layers[-1] > depth:
        raise table.error("expect.aux_layers", f"is {list(layers)}, but the target has {depth} layers")
    drafter_vocab = body.get("vocab_size") or drafter.get("vocab_size")
    if isinstance(vocab, int) and isinstance(drafter_vocab, int) and drafter_vocab != vocab:
        raise table.error(
            "drafter",
            f"was made for a vocabulary of {drafter_vocab}, the target's is {vocab}",
            "use the drafter that was trained for this target",
        )


def _config(table: _Table, key: str, folder: Path | None) -> dict[str, Any]:
    path = Path(str(folder)) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise table.error(key, f"has a config.json that cannot be read ({path}): {error}") from error
    if not isinstance(data, dict):
        raise table.error(key, f"has a config.json that is not an object ({path})")
    return data
