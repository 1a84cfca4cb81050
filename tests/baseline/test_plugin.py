"""`draftgate run ... --baseline DIR`, from the option to the exit status, with an engine that is not there."""

import pytest

from harness.baseline import text
from harness.baseline.measured import baseline_of
from harness.report.record import machine
from tests.baseline import records
from tests.plugin.test_plugin import CONFTEST, Project

COUNTS = records.accept_counts([0.5, 0.55, 0.6, 0.65, 0.7, 0.75] * 3)
WORSE = {name: [2 * row[0], *row[1:]] for name, row in COUNTS.items()}

FACTS = """
    from fixtures import plugin
    from tests.baseline import records
    facts = records.case({counts!r}, name=key.pair.name)
    del facts["id"]
    request.config.stash[plugin._RUN].write_case(key.id, **facts)
    yield"""


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path)
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("\n    yield", FACTS.format(counts=COUNTS), 1))
    (tmp_path / "baselines").mkdir()
    return made


def bless(project):
    made = records.record(records.case(COUNTS, name="small"), machine=machine())
    baseline = baseline_of(made, made["cases"][0], "run-1")
    path = text.path_of(project.folder / "baselines", baseline.case)
    path.write_text(text.render(baseline))
    return path


def measuring(project, counts):
    body = "from tests.baseline import records\n"
    body += f"measured = records.acceptance({counts!r})\n"
    body += "judge(Judgement('acceptance', (Finding('ACC030', Verdict.PASS, 'as ever'),), measured))"
    project.suite("acceptance", body)


@pytest.mark.parametrize(
    ("counts", "blessed", "status", "code", "words"),
    [
        (COUNTS, True, 0, "BAS011", "PASS"),
        (WORSE, True, 1, "BAS011", "are those of the baseline"),
        (COUNTS, False, 3, "BAS001", "there is no baseline of small on vllm, runner v1"),
    ],
)
def test_a_run_is_held_against_its_baseline(project, counts, blessed, status, code, words):
    if blessed:
        bless(project)
    measuring(project, counts)
    done = project.run("--baseline", "baselines")
    assert done.returncode == status, done.stdout + done.stderr
    assert words in done.stdout
    (judgement,) = project.record()["cases"][0]["judgements"]
    assert [finding["code"] for finding in judgement["findings"]] == ["ACC030", code]


def test_without_the_option_nothing_is_compared(project):
    measuring(project, WORSE)
    assert project.run().returncode == 0


@pytest.mark.parametrize("fault", ["a file", "the folder"])
def test_a_baseline_that_cannot_be_read_ends_the_run_before_it_begins(project, fault):
    path = bless(project)
    measuring(project, COUNTS)
    if fault == "a file":
        path.write_text(path.read_text().replace("n = 18", "n = 19"))
    done = project.run("--baseline", "baselines" if fault == "a file" else "gone")
    assert done.returncode == 2, done.stdout + done.stderr
    assert ("acceptance.n is 19" if fault == "a file" else "no such folder of baselines") in done.stdout + done.stderr
    assert not (project.folder / "runs").exists()
