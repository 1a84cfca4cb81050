"""`draftgate bless`: what it refuses, what it shows, what it writes."""

import copy
import fcntl
import json
from pathlib import Path

import pytest

from harness import cli, files
from harness.baseline import blessing, text
from harness.errors import UsageError
from harness.history.merge import merge
from tests.baseline import records

RATES = [0.5, 0.55, 0.6, 0.65, 0.7, 0.75] * 3
COUNTS = records.accept_counts(RATES)
WORSE = records.accept_counts([rate * 0.7 for rate in RATES])
SPEEDS = {1: [0.40, 0.41, 0.42, 0.41], 8: [0.10, 0.11, 0.12, 0.10]}


@pytest.fixture
def bless(tmp_path, capsys):
    """Bless a record; return the exit status and what was printed."""

    def call(made, *arguments, name="run-1"):
        run = records.write(tmp_path / "runs" / name, made)
        status = cli.main(["bless", str(run), "--baselines", str(tmp_path / "baselines"), *arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return call


@pytest.fixture
def stored(tmp_path):
    return lambda: {path.name: path.read_bytes() for path in sorted((tmp_path / "baselines").glob("*.toml"))}


def good(counts=COUNTS, speeds=SPEEDS, **changes):
    return records.record(records.case(counts, speeds), **changes)


def changed(place, value):
    """Return a good record in which the key at `place` of its case is another."""
    made = good()
    *parents, key = place
    holder = made["cases"][0]
    for name in parents:
        holder = holder[name]
    holder[key] = value
    return made


def test_nothing_is_written_without_yes(bless, stored):
    status, printed = bless(good())
    assert status == 3
    assert "--yes" in printed
    assert '+target = "sha256:aa"' in printed
    assert stored() == {}


def test_written_read_back_and_the_same_for_the_same_run(bless, stored, tmp_path):
    assert bless(good(), "--yes")[0] == 0
    first = stored()
    (name,) = first
    assert name == "pair--vllm--v1--cpu-Processor-9000-8-cores-avx2-avx512f.toml"
    assert text.read(tmp_path / "baselines" / name).provenance.run == "run-1"
    status, printed = bless(good(), "--yes")
    assert (status, stored()) == (0, first)
    assert "unchanged" in printed
    (tmp_path / "baselines" / name).unlink()
    bless(good(), "--yes")
    assert stored() == first


def test_the_difference_to_the_former_one_is_shown(bless, stored):
    bless(good(), "--yes")
    before = stored()
    status, printed = bless(good(WORSE), name="run-2")
    assert status == 3
    assert stored() == before
    assert '-run = "run-1"' in printed
    assert '+run = "run-2"' in printed
    assert "accept length: -" in printed
    assert "worse)" in printed
    assert "speed-up at concurrency 8: +0.0%" in printed
    assert bless(good(WORSE), "--yes", name="run-2")[0] == 0
    assert stored() != before


def with_red():
    made = good(verdict="FAIL")
    made["cases"][0]["judgements"][1]["verdict"] = "FAIL"
    return made


def good_but_for_a_judgement():
    return with_red() | {"verdict": "PASS"}


def without_a_processor():
    made = good()
    made["machine"]["cpu_flags"] = None
    return made


def on_an_unknown_gpu():
    made = good()
    made["cases"][0]["device"] = "cuda"
    return made


def without_acceptance():
    made = good()
    del made["cases"][0]["judgements"][0]
    return made


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (good(complete=False), "did not come to its end"),
        (good_but_for_a_judgement(), "is PASS: it is PASS; pair-vllm-v1 startup FAIL"),
        (with_red(), "is PASS: it is FAIL; pair-vllm-v1 startup FAIL"),
        (good(verdict="INVALID"), "is PASS: it is INVALID"),
        (good(verdict="INCONCLUSIVE"), "is PASS: it is INCONCLUSIVE"),
        (good(not_selected={"pair-vllm-v1": ["losslessness"]}), "left out by hand (-k, a path): losslessness"),
        (good(not_selected={"other": ["weights"]}), "other: refused"),
        (good(never_judged={"pair-vllm-v1": ["weights"]}), "left no judgement: weights"),
        (good({name: [100, 14, 0, 0, 0] for name in COUNTS}), "accept length 1.140 is below 1.15"),
        (without_a_processor(), "the processor, its flags or its cores are unknown"),
        (on_an_unknown_gpu(), "the GPU is unknown (unknown: there is no nvidia-smi)"),
        (good({**COUNTS, "p00": [20, 3, 4, 0, 0]}), "acceptance.counts.p00 rises"),
        (without_acceptance(), "no acceptance was measured"),
    ],
)
def test_what_is_no_reference_is_refused(bless, stored, made, words):
    status, printed = bless(made, "--yes", "--replace")
    assert status == 1
    assert words in printed
    assert "remedy: " in printed
    assert stored() == {}


def test_every_refused_case_is_named(bless):
    dead = {name: [100, 1, 0, 0, 0] for name in COUNTS}
    status, printed = bless(records.record(records.case(dead, name="one"), records.case(dead, name="two")))
    assert status == 1
    assert "one-vllm-v1: refused" in printed
    assert "two-vllm-v1: refused" in printed


def comparison(**old):
    sides = [records.case(COUNTS, SPEEDS) | {"id": f"pair-vllm-v1-{side}", "side": side} for side in ("old", "new")]
    sides[0]["engine"]["version"] = "0.31.0"
    sides[0] |= old
    return records.record(*sides)


def test_of_a_comparison_the_new_side_is_blessed(bless, stored):
    red = [{"suite": "weights", "verdict": "FAIL", "findings": [], "measurements": {}}]
    assert bless(comparison(judgements=red), "--yes")[0] == 0
    (written,) = stored().values()
    assert b'version = "0.32.0"' in written
    status, printed = bless(comparison(), "--yes", "--case", "pair-vllm-v1-old")
    assert status == 1
    assert "the old side of a comparison" in printed


def test_two_cases_for_one_file_are_refused(bless, stored):
    status, printed = bless(comparison(side=""), "--yes")
    assert (status, stored()) == (1, {})
    assert "choose with --case" in printed
    assert bless(comparison(side=""), "--yes", "--case", "pair-vllm-v1-new")[0] == 0


def test_one_refused_case_keeps_the_others_from_being_written(bless, stored):
    dead = records.case({name: [100, 1, 0, 0, 0] for name in COUNTS}, name="dead")
    made = records.record(records.case(COUNTS), dead)
    assert bless(made, "--yes")[0] == 1
    assert stored() == {}
    assert bless(made, "--yes", "--case", "pair-vllm-v1")[0] == 0
    assert len(stored()) == 1


OTHERS = [
    (changed(("target", "digest"), "sha256:other"), "target sha256:aa -> sha256:other"),
    (changed(("drafter", "digest"), "sha256:other"), "drafter sha256:bb -> sha256:other"),
    (changed(("prompts", "digest"), "sha256:other"), "prompts sha256:cc -> sha256:other"),
    (changed(("pair", "dtype"), "float32"), "dtype bfloat16 -> float32"),
    (changed(("pair", "workload", "max_tokens"), 128), "max_tokens 64 -> 128"),
    (changed(("pair", "workload", "throughput_tokens"), 32), "throughput.tokens 64 -> 32"),
    (changed(("pair", "side_by_side"), False), "throughput.interleaved True -> False"),
    (good(speeds={1: SPEEDS[1]}), "throughput at concurrency 8"),
    (good({f"x{name}": row for name, row in COUNTS.items()}), "the prompts that were counted"),
    (good(speeds=None), "throughput, which the run does not measure"),
]


@pytest.mark.parametrize(("made", "words"), OTHERS)
def test_another_case_needs_replace(bless, stored, made, words):
    bless(good(), "--yes")
    before = stored()
    status, printed = bless(made, "--yes", name="run-2")
    assert status == 1
    assert words in printed
    assert "--replace" in printed
    assert stored() == before
    assert bless(made, "--yes", "--replace", name="run-2")[0] == 0
    assert stored() != before


def test_a_canary_does_not_silently_become_an_estimate(bless):
    assert bless(records.record(records.case(COUNTS, canary="small")), "--yes")[0] == 0
    status, printed = bless(records.record(records.case(COUNTS)), "--yes", name="run-2")
    assert status == 1
    assert "acceptance.exact true -> false" in printed


def test_another_k_needs_replace(bless, stored):
    bless(good(), "--yes")
    before = stored()
    made = changed(("pair", "k"), 3)
    for prompt in made["cases"][0]["judgements"][0]["measurements"]["prompts"]:
        prompt["per_position"] = prompt["per_position"][:3]
    status, printed = bless(made, "--yes", name="run-2")
    assert (status, stored()) == (1, before)
    assert "k 4 -> 3" in printed


def test_another_device_class_is_another_file(bless, stored):
    bless(good(), "--yes")
    made = good()
    made["machine"]["cpu_flags"] = ["avx2"]
    assert bless(made, "--yes")[0] == 0
    assert len(stored()) == 2


def slower(share):
    return {**SPEEDS, 8: [value - share for value in SPEEDS[8]]}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (good(WORSE), "it would lower accept length -"),
        (good(speeds=slower(0.2)), "it would lower speed-up at concurrency 8 -18.1%"),
    ],
)
def test_the_ratchet_refuses_what_is_worse(bless, stored, made, words):
    bless(good(), "--yes")
    before = stored()
    status, printed = bless(made, "--yes", "--ratchet", name="run-2")
    assert status == 1
    assert words in printed
    assert stored() == before


def test_the_ratchet_cannot_slip_by_small_steps(bless, stored):
    bless(good(), "--yes")
    before = stored()
    status, printed = bless(good(speeds=slower(0.003)), "--yes", "--ratchet", name="run-2")
    assert (status, stored()) == (0, before)
    assert "the former reference stands" in printed


def test_the_ratchet_rises(bless, stored):
    bless(good(WORSE), "--yes")
    before = stored()
    assert bless(good(), "--yes", "--ratchet", name="run-2")[0] == 0
    assert stored() != before


def test_the_ratchet_and_replace_exclude_each_other(bless):
    with pytest.raises(SystemExit) as caught:
        bless(good(), "--ratchet", "--replace")
    assert caught.value.code == 2


def test_a_write_that_fails_leaves_the_former_file_whole(bless, stored, monkeypatch):
    bless(good(), "--yes")
    before = stored()

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    status, printed = bless(good(WORSE), "--yes", name="run-2")
    assert (status, stored()) == (2, before)
    assert "No space left" in printed


def blessings(tmp_path, made, name):
    written, refused = blessing.bless(name, made, tmp_path / "baselines", replace=False, ratchet=True)
    assert refused == []
    return written


@pytest.mark.parametrize("there_before", [True, False])
def test_of_two_who_bless_at_once_the_second_is_refused(bless, stored, tmp_path, there_before):
    if there_before:
        bless(good(speeds=slower(0.02)), "--yes")
    better, best = (blessings(tmp_path, good(speeds=slower(share)), f"run-{share}") for share in (0.01, 0.0))
    blessing.write(best, tmp_path / "baselines")
    before = stored()
    with pytest.raises(UsageError, match="meanwhile"):
        blessing.write(better, tmp_path / "baselines")
    assert stored() == before
    assert b"run-0.0" in next(iter(before.values()))
    # What is refused is the sequence, not the run: held against what is there now, the ratchet decides.
    (again,) = blessings(tmp_path, good(speeds=slower(0.01)), "run-0.01")
    assert "the former reference stands" in again.kept


def test_nobody_else_writes_between_the_last_look_and_the_writing(bless, stored, tmp_path, monkeypatch):
    busy = []

    def write(path, text):
        with (tmp_path / "baselines" / ".lock").open("a") as handle, pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        busy.append(path)

    monkeypatch.setattr(blessing, "write_atomically", write)
    assert bless(good(), "--yes")[0] == 0
    assert len(busy) == 1


def merged(tmp_path, *machines):
    """Merge two shards that ran on two machines, and return the record."""
    runs = []
    for number, machine in enumerate(machines):
        case = records.case(COUNTS, SPEEDS, name=f"pair{number}")
        for judgement in case["judgements"]:
            judgement["test"] = f"test_{judgement['suite']}"
        made = records.record(
            case, machine=records.MACHINE | machine, draftgate=f"0.{number}", finished=f"2026-11-30T1{number}:00:00Z"
        )
        runs.append(records.write(tmp_path / "shards" / f"shard-{number}", made))
    return merge(tmp_path / "merged", runs)


def test_a_merged_run_is_blessed_as_the_runs_that_measured(bless, stored, tmp_path, capsys):
    folder = merged(tmp_path, {}, {"cores": 4, "memory_bytes": 2**34, "system": "Linux 7"}).run.path
    assert cli.main(["bless", str(folder), "--baselines", str(tmp_path / "baselines"), "--yes"]) == 0
    kept = [text.read(path) for path in sorted((tmp_path / "baselines").glob("*.toml"))]
    assert [each.case.device for each in kept] == [
        "cpu: Processor 9000, 8 cores, avx2 avx512f", "cpu: Processor 9000, 4 cores, avx2 avx512f",
    ]  # fmt: skip
    assert [(each.provenance.run, each.provenance.draftgate, each.provenance.finished) for each in kept] == [
        ("shard-0", "0.0", "2026-11-30T10:00:00Z"), ("shard-1", "0.1", "2026-11-30T11:00:00Z"),
    ]  # fmt: skip
    assert [(each.provenance.cores, each.provenance.memory_gib, each.provenance.system) for each in kept] == [
        (8, 32, "Linux 6"), (4, 16, "Linux 7"),
    ]  # fmt: skip
    from_merged = stored()
    for number in range(2):
        shard = tmp_path / "shards" / f"shard-{number}"
        assert cli.main(["bless", str(shard), "--baselines", str(tmp_path / "baselines"), "--yes"]) == 0
    assert stored() == from_merged, "the shards alone give the same bytes"


def test_a_merged_case_of_a_run_that_the_record_does_not_name_is_bad_input(bless, stored, tmp_path):
    made = dict(merged(tmp_path, {}, {}).record)
    made["cases"] = [case | {"run": "another"} for case in made["cases"]]
    status, printed = bless(json.loads(json.dumps(made)), "--yes")
    assert (status, stored()) == (2, {})
    assert "run is 'another', and merged has shard-0, shard-1" in printed


def test_cores_of_a_quota_are_written_and_read_back(bless, tmp_path):
    made = good(machine=records.MACHINE | {"cores": 1.5})
    for _ in range(2):
        assert bless(made, "--yes")[0] == 0
    (path,) = (tmp_path / "baselines").glob("*.toml")
    assert text.read(path).provenance.cores == 1.5


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [({"cores": None}, 1, "its cores are unknown"), ({"cpu_flags": 5}, 2, "cpu_flags"), ({"cores": "8"}, 2, "cores")],
)
def test_a_machine_of_another_shape_is_named(bless, stored, change, status, words):
    assert bless(good(machine=records.MACHINE | change), "--yes")[0] == status
    assert words in bless(good(machine=records.MACHINE | change), "--yes")[1]
    assert stored() == {}


def test_a_former_file_that_cannot_be_read_is_not_overwritten(bless, stored, tmp_path):
    bless(good(), "--yes")
    (path,) = (tmp_path / "baselines").glob("*.toml")
    path.write_text(path.read_text().replace("k = 4", "k = nan"))
    before = stored()
    status, printed = bless(good(), "--yes", "--replace")
    assert (status, stored()) == (2, before)
    assert path.name in printed
    assert "case.k" in printed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "no run record"),
        ("[]", "no run record"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "draftgate": "0", "machine": {}}', "`not_selected`"),
    ],
)
def test_what_is_no_record_is_bad_input(tmp_path, capsys, content, words):
    (tmp_path / "record.json").write_text(content)
    assert cli.main(["bless", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "place", [("pair",), ("pair", "k"), ("target", "digest"), ("judgements",), ("engine", "packages")]
)
def test_a_record_without_a_key_is_bad_input(bless, stored, place):
    made = copy.deepcopy(good())
    *parents, key = place
    holder = made["cases"][0]
    for name in parents:
        holder = holder[name]
    del holder[key]
    status, printed = bless(made, "--yes")
    assert (status, stored()) == (2, {})
    assert f"`{key}`" in printed


def test_no_such_run_and_no_such_case(bless, capsys):
    assert cli.main(["bless", str(Path("gone"))]) == 2
    assert "gone" in capsys.readouterr().err
    assert bless(good(), "--case", "nothing")[0] == 2
