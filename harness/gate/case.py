"""One case: a pair on an engine under one model runner. Prepares checkpoints, starts servers, hands out evidence."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoint.read import Checkpoint, read
from harness.engines.base import Adapter, EngineIdentity, Launch
from harness.engines.surface import Surface, said_in
from harness.errors import CheckpointError, EvidenceError, HarnessError, ServerError, UsageError
from harness.files import write_atomically
from harness.gate import aux_hidden
from harness.gate.startup import Started
from harness.measure.endpoint import Counters, Endpoint, Generation, Prompt, Said, TokenLogit, Witness
from harness.metrics.measure import Log
from harness.pairs.model import Pair
from harness.probe import evidence as probe
from harness.probe.facts import Evidence, Load
from harness.servers.pool import ServerPool
from harness.servers.server import Server
from harness.servers.workspace import inherited
from harness.verdict import Finding

if TYPE_CHECKING:
    from harness.canary.oracle import Acceptance, Oracle
    from harness.pairs.real import RebuiltTarget

__all__ = ["Case", "Checkpoints", "end_all", "prepare", "prompt_texts"]


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """A pair's two checkpoints on disk; `oracle` is there for canaries only."""

    target: Checkpoint
    drafter: Checkpoint
    oracle: Oracle | None
    tokenizer: bool
    rebuilt: RebuiltTarget | None = None

    def alike(self, drafter_key: str, target_key: str) -> bool:
        """Whether a tensor of the drafter and one of the target hold the same values. False if either is not there."""
        from harness.checkpoint.data import alike  # noqa: PLC0415 -- imports numpy

        if drafter_key not in self.drafter.tensors or target_key not in self.target.tensors:
            return False
        shards = self.drafter.shard_of(drafter_key), self.target.shard_of(target_key)
        return alike(shards[0], drafter_key, shards[1], target_key)

    def tied(self, head: str, embedding: str) -> bool:
        """Whether the target's config ties its output to its embedding, and both tensors are there and the same."""
        from harness.checkpoint.data import alike  # noqa: PLC0415 -- imports numpy

        configs = (self.target.config, self.target.config.get("text_config") or {})
        if not any(config.get("tie_word_embeddings") for config in configs):
            return False
        if not {head, embedding} <= set(self.target.tensors):
            return False
        return alike(self.target.shard_of(head), head, self.target.shard_of(embedding), embedding)


def prepare(pair: Pair, cache: Path, python: Path, progress: Callable[[str], None]) -> Checkpoints:
    """Build or find a pair's checkpoints. `python` is the engine's, which a rebuilt target needs.

    Raises:
        HarnessError: a checkpoint cannot be built or read, or does not keep what the pair promises.

    """
    oracle = rebuilt = None
    if pair.canary is not None:
        from harness.canary.build import build  # noqa: PLC0415 -- imports numpy
        from harness.canary.spec import SHIPPED  # noqa: PLC0415

        progress(f"building canary {pair.canary}")
        canary = build(
            SHIPPED[pair.canary], cache / "canaries" / f"{pair.canary}-{SHIPPED[pair.canary].fingerprint[:12]}"
        )
        target, drafter, oracle = canary.target, pair.drafter or canary.drafter, canary.oracle
    elif pair.rebuild is not None:
        from harness.pairs.real import ensure_target  # noqa: PLC0415 -- only real pairs need it

        rebuilt = ensure_target(pair.rebuild, python, cache / "targets", progress)
        target, drafter = rebuilt.folder, pair.rebuild
    else:
        assert pair.target is not None  # noqa: S101 -- the reader of pairs files guarantees it
        assert pair.drafter is not None  # noqa: S101
        target, drafter = pair.target, pair.drafter
    has_tokenizer = (target / "tokenizer.json").exists()
    found = Checkpoints(read(target), read(drafter), oracle, has_tokenizer, rebuilt)
    _check(pair, found)
    return found


def _check(pair: Pair, found: Checkpoints) -> None:
    config = found.target.config
    hidden = (config.get("text_config") or config).get("hidden_size")
    fc = found.drafter.tensors.get("fc.weight")
    if fc is not None and isinstance(hidden, int) and (not fc.shape or fc.shape[-1] % hidden):
        width = fc.shape[-1] if fc.shape else 1
        raise CheckpointError(
            f"{found.drafter.folder}: fc.weight {list(fc.shape)} takes {width}, no multiple of the target's hidden "
            f"size {hidden} ({found.target.folder}/config.json)",
            remedy="use the drafter that was trained for this target",
        )
    if misfit := pair.expect.misfit(hidden):
        raise CheckpointError(
            f"{pair.source}: pairs.{pair.name}.expect.aux_hidden_dim {misfit[0]} ({found.target.folder}/config.json)",
            remedy=misfit[1],
        )


@dataclasses.dataclass(frozen=True)
class _Watched:
    """An endpoint whose every request is watched: a server that dies or hangs under it is named, log tail and all.

    `connect` returns the endpoint and its server, which it starts where it does not run.
    """

    label: str
    speculative: bool
    connect: Callable[[], tuple[Endpoint, Server]]

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        with self._request() as endpoint:
            return endpoint.generate(prompt, max_tokens)

    def counters(self) -> Counters:
        with self._request() as endpoint:
            return endpoint.counters()

    def witnesses(self) -> tuple[Witness, ...]:
        with self._request() as endpoint:
            return endpoint.witnesses()

    def figures(self) -> Mapping[str, Said]:
        with self._request() as endpoint:
            return endpoint.figures()

    def next_token_logits(self, prompt_token_ids: tuple[int, ...], top: int) -> list[TokenLogit]:
        with self._request() as endpoint:
            return endpoint.next_token_logits(prompt_token_ids, top)

    @contextlib.contextmanager
    def _request(self) -> Iterator[Endpoint]:
        endpoint, process = self.connect()
        try:
            with process.busy():
                yield endpoint
        except OSError as error:
            raise ServerError(
                f"{self.label}: a request failed although the server runs: {error}",
                remedy=f"read {process.log_path}",
            ) from error


@dataclasses.dataclass
class Case:
    """A pair, an engine release, a model runner. Servers start on first use, at most one of each kind.

    Where the pair's servers do not run side by side, the use of one ends the other, and those of its `rivals`; they
    start again when they are used. With `keep_features` the probe also keeps what reaches the drafter, which costs
    time.
    """

    id: str
    pair: Pair
    adapter: Adapter
    identity: EngineIdentity
    runner: str
    device: str
    folder: Path
    checkpoints: Checkpoints
    pool: ServerPool
    provenance: tuple[Finding, ...] = ()
    rivals: tuple[Case, ...] = ()
    keep_features: bool = False

    @functools.cached_property
    def prompts(self) -> list[Prompt]:
        """The pair's prompts: the canary's own token ids, or lines of the pair's file through the chat template."""
        work = self.pair.workload
        if self.checkpoints.oracle is not None:
            drawn = self.checkpoints.oracle.prompts(work.count, work.length, work.seed)
            return [Prompt(f"p{index:02d}", token_ids=tuple(ids)) for index, ids in enumerate(drawn)]
        if work.prompts_file is None:
            if self.checkpoints.tokenizer:
                return [
                    Prompt(f"p{i:02d}", messages=(("user", text),), ignore_eos=False) for i, text in enumerate(_PLAIN)
                ]
            raise UsageError(
                f"{self.pair.source}: pairs.{self.pair.name} has neither a prompts file nor a tokenizer",
                remedy="set workload.prompts_file, or give the target its tokenizer.json",
            )
        texts = prompt_texts(work.prompts_file)
        step = max(1, len(texts) // work.count)
        chosen = texts[::step][: work.count]
        return [Prompt(f"p{i:02d}", messages=(("user", text),), ignore_eos=False) for i, text in enumerate(chosen)]

    @property
    def throughput_prompts(self) -> list[Prompt]:
        """The prompts of a throughput round. They ignore EOS, so that both sides do the same work whatever they say."""
        chosen = self.prompts[: self.pair.workload.throughput_count]
        return [dataclasses.replace(prompt, ignore_eos=True) for prompt in chosen]

    def oracle_counts(self) -> dict[str, Acceptance] | None:
        """For a canary, the exact counts of every prompt, by name; else None."""
        oracle, work = self.checkpoints.oracle, self.pair.workload
        if oracle is None:
            return None
        return {
            prompt.name: oracle.acceptance(prompt.token_ids or (), work.max_tokens, self.pair.k)
            for prompt in self.prompts
        }

    def oracle_outputs(self) -> dict[str, tuple[int, ...]] | None:
        """For a canary, the exact greedy output of every prompt, by name; else None."""
        oracle, tokens = self.checkpoints.oracle, self.pair.workload.max_tokens
        if oracle is None:
            return None
        return {prompt.name: tuple(oracle.continuation(prompt.token_ids or (), tokens)) for prompt in self.prompts}

    def accept_length(self) -> float:
        """Return the threshold of a pair that has no oracle.

        Raises:
            UsageError: the pair promises none; there is nothing to hold the measurement against.

        """
        minimum = self.pair.expect.accept_length
        if minimum is None:
            raise UsageError(
                f"{self.pair.source}: pairs.{self.pair.name}.expect has no accept_length",
                remedy="write the accept length that this pair must clear (above 1)",
            )
        return minimum

    @property
    def prompts_digest(self) -> str:
        """A digest of exactly what is asked, for the record."""
        data = json.dumps([dataclasses.asdict(prompt) for prompt in self.prompts], sort_keys=True)
        return f"sha256:{hashlib.sha256(data.encode()).hexdigest()}"

    @functools.cached_property
    def _speculative_launch(self) -> Launch:
        evidence = self.folder / "evidence"
        target, drafter = self.checkpoints.target.folder, self.checkpoints.drafter.folder
        env = probe.environment(
            evidence, str(target), str(drafter), engine=self.adapter.name, features=self.keep_features
        )
        return self._launch("spec", drafter, env)

    @functools.cached_property
    def _plain_launch(self) -> Launch:
        return self._launch("plain", None, {})

    def _launch(self, kind: str, drafter: Path | None, env: Mapping[str, str]) -> Launch:
        launch = self.pair.launch(self.adapter.name)
        return Launch(
            label=f"{self.id}-{kind}",
            target=self.checkpoints.target.folder,
            drafter=drafter,
            method=self.pair.method,
            k=self.pair.k,
            dtype=self.pair.dtype,
            runner=self.runner,
            device=self.device,
            tokenizer=self.checkpoints.tokenizer,
            args=launch.args,
            env=tuple(sorted({**dict(launch.env), **env}.items())),
            startup_s=self.pair.expect.startup_s,
            version=self.identity.version,
        )

    def server(self, *, speculative: bool) -> Server:
        """Return the running server with or without speculation, started on first use and checked on every other."""
        launch = self._speculative_launch if speculative else self._plain_launch
        other = self.__dict__.get("_plain_launch" if speculative else "_speculative_launch")
        if not self.pair.side_by_side:
            if other is not None:
                self.pool.release(self.adapter.spec(self.identity, other))
            for rival in self.rivals:
                rival.release()
        spec = self.adapter.spec(self.identity, launch)
        if speculative and not self.pool.holds(spec):
            # What a server that is gone has left there is no evidence of the one that starts.
            evidence = self.folder / "evidence"
            if evidence.is_dir() and any(evidence.iterdir()):
                evidence.rename(self.folder / f"evidence-{1 + len(self._earlier_evidence())}")
            evidence.mkdir(parents=True, exist_ok=True)
        return self.pool.get(
            spec, self.folder / launch.label.removeprefix(f"{self.id}-"), lambda url: self.adapter.ready(launch, url)
        )

    def endpoint(self, *, speculative: bool) -> Endpoint:
        """Return the measuring side of that server, which is started here if the pair's servers run side by side.

        Raises what `ServerPool.get` raises; the error of a start that has failed at once, whoever is asked first.
        """
        launch = self._speculative_launch if speculative else self._plain_launch
        self.pool.fail_again(self.adapter.spec(self.identity, launch))
        connected: dict[str, Endpoint] = {}

        def connect() -> tuple[Endpoint, Server]:
            server = self.server(speculative=speculative)
            if server.base_url not in connected:
                connected[server.base_url] = self.adapter.endpoint(launch, server.base_url)
            return connected[server.base_url], server

        if self.pair.side_by_side:
            both = connect()  # once: nothing is looked up again while requests are timed
            return _Watched(launch.label, launch.drafter is not None, lambda: both)
        return _Watched(launch.label, launch.drafter is not None, connect)

    def started_anew(self) -> Endpoint:
        """Start the speculative server, after an end of its last run and of the rivals', and return its endpoint.

        Raises what `ServerPool.get` and `ServerPool.release` raise.
        """
        for each in (*self.rivals, self):
            each.stop(speculative=True)
        launch, server = self._speculative_launch, self.server(speculative=True)
        both = self.adapter.endpoint(launch, server.base_url), server
        return _Watched(launch.label, True, lambda: both)

    def spoken(self) -> Log:
        """Return the log of the speculative server, where it tells of acceptance."""
        where = self.adapter.log_figures(self._speculative_launch)

        def lines() -> list[dict[str, Said]]:
            text = self.server(speculative=True).log_path.read_text(encoding="utf-8", errors="replace")
            found = (re.split(where.pattern, line, maxsplit=1) for line in text.splitlines())
            return [said_in(parts[-1]) for parts in found if len(parts) > 1]

        return Log(lines, where.every, where.seconds)

    def started(self, *, speculative: bool) -> Started:
        """Return the facts of that server's start-up."""
        server = self.server(speculative=speculative)
        log = server.log_path.read_text(encoding="utf-8", errors="replace")
        return Started(
            server.spec.name, server.started_in_s, self.adapter.runner_in_force(log), log, f"readiness: {server.proof}"
        )

    def logs(self) -> dict[str, str]:
        """Return what every server of this case has written so far, by the name of its log.

        Raises:
            EvidenceError: none was started.

        """
        found = sorted(path for kind in ("spec", "plain") for path in (self.folder / kind).glob("*.log"))
        if not found:
            raise EvidenceError(f"{self.id}: no server was started, so there is no log")
        return {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in found}

    def evidence(self) -> Evidence:
        """Return what the probe saw in the speculative server, which is started if need be."""
        spec, folder = self.adapter.spec(self.identity, self._speculative_launch), self.folder / "evidence"
        # Where they take turns, what was seen stays readable; a start that failed is raised again.
        seen = folder.is_dir() and any(folder.iterdir())
        if self.pair.side_by_side or not seen or self.pool.holds(spec):
            self.server(speculative=True)
        return self.seen()

    def seen(self) -> Evidence:
        """Return what the probe saw in the newest speculative server, which may be gone.

        Raises:
            EvidenceError: as `probe.evidence.read`, or another engine ran than the one that was identified.

        """
        found = probe.read(self.folder / "evidence")
        if Path(found.engine_path).resolve() != Path(self.identity.package).resolve():
            raise EvidenceError(
                f"{self.id}: the server ran {found.engine} {found.engine_version} of {found.engine_path}, not the "
                f"{self.identity.version} of {self.identity.package or self.identity.python}",
                remedy="take away what puts another engine before it (a PYTHONPATH, the pair's `env`)",
            )
        return found

    def loads_of_failed_start(self) -> tuple[Load, ...]:
        """Return the loads that the probe saw in a server that did not start; none if it saw nothing."""
        try:
            return probe.read_loads(self.folder / "evidence")
        except EvidenceError:
            return ()

    def evidence_so_far(self) -> Evidence | str | None:
        """Return the probe's evidence for the record: the newest that can be read.

        Else why it cannot be read, or None if nothing was started.
        """
        if "_speculative_launch" not in self.__dict__:
            return None
        why = ""
        for folder in (self.folder / "evidence", *reversed(self._earlier_evidence())):
            try:
                return probe.read(folder)
            except EvidenceError as error:
                why = why or str(error)
        return why

    def _earlier_evidence(self) -> list[Path]:
        """Return the folders of evidence of servers that are gone, the oldest first."""
        return sorted(self.folder.glob("evidence-*"), key=lambda each: int(each.name.rpartition("-")[2]))

    def expected_aux(self) -> aux_hidden.Expected:
        """Return what the drafter was trained on."""
        config = self.checkpoints.target.config
        text = config.get("text_config") or config
        return aux_hidden.expected(
            drafter_config=self.checkpoints.drafter.config,
            target_hidden=text["hidden_size"],
            target_layers=text["num_hidden_layers"],
            pair_width=self.pair.expect.aux_hidden_dim,
            pair_layers=self.pair.expect.aux_layers,
        )

    def facts(self) -> dict[str, Any]:
        """Return what the record says about this case before anything was started."""
        found = self.checkpoints
        return {
            "pair": self.pair,
            "engine": self.identity,
            "runner_asked": self.runner,
            "device": self.device,
            "target": {"folder": found.target.folder, "digest": found.target.digest, "bytes": found.target.size},
            "rebuilt": found.rebuilt,
            "drafter": {"folder": found.drafter.folder, "digest": found.drafter.digest, "bytes": found.drafter.size},
            "prompts": {"count": len(self.prompts), "digest": self.prompts_digest, "seed": self.pair.workload.seed},
        }

    def launch_facts(self, *, speculative: bool) -> dict[str, Any]:
        """Return what the record says about a server: its command line, environment, timeline and readiness.

        Of the speculative one also what it shows to dashboards and launch scripts, or why that could not be read.
        """
        server = self.server(speculative=speculative)
        return {
            **({"surface": self._surface(server)} if speculative else {}),
            "argv": server.spec.command(server.port),
            "env": dict(server.spec.env),
            "inherited": inherited(server.spec),
            "started_in_s": server.started_in_s,
            "timeline": server.timeline,
            "proof": server.proof,
            "log": server.log_path,
        }

    def _surface(self, server: Server) -> Surface | dict[str, str]:
        try:
            with server.busy():
                return self.adapter.surface(self.identity, self._speculative_launch, server.base_url)
        except (HarnessError, OSError) as error:
            return {"missing": str(error)}

    def keep(self, file: str, measured: Mapping[str, Any]) -> None:
        """Write what was measured so far beside the servers' logs: it may take hours, and a killed run keeps it."""
        write_atomically(self.folder / file, json.dumps(measured, indent=1) + "\n")

    def stop(self, *, speculative: bool) -> None:
        """Stop the server with or without speculation, if it was started. Raises ServerLeftovers as the pool does."""
        launch = self.__dict__.get("_speculative_launch" if speculative else "_plain_launch")
        if launch is not None:
            self.pool.release(self.adapter.spec(self.identity, launch))

    def release(self) -> None:
        """Stop this case's servers.

        Raises:
            ExceptionGroup: what went wrong; one server's trouble does not keep the other running.

        """
        end_all(self.id, [functools.partial(self.stop, speculative=speculative) for speculative in (True, False)])


def end_all(name: str, ends: Iterable[Callable[[], None]]) -> None:
    """Call all of `ends`, each of which ends servers.

    Raises:
        ExceptionGroup: what went wrong, in one level; one server's trouble does not keep the other running.

    """
    errors: list[Exception] = []
    for end in ends:
        try:
            end()
        except Exception as error:  # noqa: BLE001 -- collected and raised
            errors += error.exceptions if isinstance(error, ExceptionGroup) else [error]
    if errors:
        raise ExceptionGroup(f"the servers of {name} did not end well", errors)


# Enough for an ad-hoc pair to be judged without a prompts file; a real pair should bring its own held-out prompts.
_PLAIN = tuple(
    f"{ask} {topic}."
    for topic in ("tides", "binary search", "photosynthesis", "the printing press", "compound interest", "volcanoes")
    for ask in ("Explain", "Write a short list of facts about", "Summarise in three sentences the importance of")
)


def prompt_texts(path: Path) -> list[str]:
    """Return the prompts of a file of JSON lines. Raises UsageError for a line that has none, or an empty file."""
    texts = []
    # Not splitlines: JSON may hold U+2028 and its like as they are.
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    for number, line in enumerate(lines if lines != [""] else [], start=1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path}:{number}: not a JSON object with a `prompt`: {error!r}", remedy="one JSON object a line"
            ) from error
        if not isinstance(prompt, str) or not prompt.strip():
            raise UsageError(f"{path}:{number}: `prompt` is {prompt!r}", remedy="write a text that is not empty")
        texts.append(prompt)
    if not texts:
        raise UsageError(f"{path}: has no prompts", remedy="one JSON object a line, each with a `prompt`")
    return texts
