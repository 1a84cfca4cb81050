"""Runs as `draftgate run` writes them, without an engine."""

import json

from harness.report.record import RunFolder
from harness.verdict import Finding, Judgement, Verdict


def judged(suite, verdict="PASS", code="XYZ001", measurements=None):
    finding = Finding(code, Verdict[verdict], "a summary", cause="a cause", remedy="a remedy")
    return Judgement(suite, (finding,), measurements or {})


def accepted(drafts, count, per_position, verdict="PASS", interval=None):
    totals = {"drafts": drafts, "accepted": count, "per_position": per_position}
    bounds = {"accept_length": {"lower": interval[0], "upper": interval[1]}} if interval else {}
    return judged("acceptance", verdict, "ACC030", {"totals": totals, **bounds})


def case_facts(pair="p", engine="vllm", version="0.30.0", drafter="sha256:d", **more):
    return {
        "pair": {"name": pair, "k": 4},
        "engine": {"engine": engine, "version": version},
        "runner_asked": "v1",
        "device": "cpu",
        "target": {"digest": "sha256:t"},
        "drafter": {"digest": drafter},
        "prompts": {"digest": "sha256:p"},
        **more,
    }


def make(folder, cases, *, started="2026-11-30T10:00:00Z", asked=None, selected=None, complete=True, machine=None):
    """Write a run folder and its record. `cases`: id -> (facts, judgements)."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder(folder)
    asked = asked or {name: [each.suite for each in judgements] for name, (_, judgements) in cases.items()}
    machine = machine or {"cpu": "c"}
    run.write_run(started=started, finished=started, command="draftgate run", machine=machine, asked=asked)
    if selected is not None:
        run.write_selection({case: {f"test_{suite}": suite for suite in suites} for case, suites in selected.items()})
    for name, (about, judgements) in cases.items():
        run.write_case(name, **about)
        for each in judgements:
            run.write_judgement(name, f"test_{each.suite}", each, seconds=1)
    run.assemble(complete=complete)
    return folder


def edit(folder, **facts):
    """Change a record behind its writer's back."""
    path = folder / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def one(root, name, length=3.0, **more):
    """Write a run of one case with this accept length (K = 4, 1000 steps)."""
    count = round((length - 1) * 1000)
    positions = [min(max(count - 1000 * position, 0), 1000) for position in range(4)]
    about = case_facts(**{key: more.pop(key) for key in ("pair", "engine", "version", "drafter") if key in more})
    return make(root / name, {"p-vllm-v1": (about, [accepted(1000, count, positions)])}, **more)
