"""Records in which any value is anything: an error that names the file, or a record; never a traceback."""

import copy
import io
import json
import random

from harness.errors import HarnessError
from harness.history import facts, show, store, trend
from harness.history.merge import merge
from harness.report.table import print_table
from tests.history.support import accepted, case_facts, judged, make
from tests.history.test_facts import round_

JUNK = [
    None, True, -1, 0, 10**400, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "a\nb\0", "../..", "[bold]",
    [], {}, [None], {"": 0}, "9" * 5000,
]  # fmt: skip


def places(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def screen():
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def test_any_value_may_be_anything(tmp_path):
    rounds = [
        round_(4, speculative=side, pair=pair, tokens=100, seconds=1.0) for side in (True, False) for pair in (0, 1)
    ]
    servers = {"c-spec": {"started_in_s": 50.5}}
    judgements = [
        accepted(10, 15, [8, 7], interval=(2.2, 2.8)),
        judged("throughput", measurements={"rounds": rounds}),
        judged("startup", "FAIL", measurements={"servers": servers}),
    ]
    about = case_facts(side="new", not_asked={"weights": "why"})
    run = make(tmp_path / "r", {"c": (about, judgements)}, asked={"c": ["startup", "weights"]})
    path = run / "record.json"
    sound = json.loads(path.read_text()) | {"comparison": {"old": "1", "new": "2"}}
    chooser = random.Random(20261130)
    kept, messages = 0, []
    everywhere = [(place, junk) for place in places(sound) for junk in JUNK]
    for number, (place, junk) in enumerate(chooser.sample(everywhere, 80)):
        record = copy.deepcopy(sound)
        inner = record
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = junk
        path.write_text(json.dumps(record))
        database, out = tmp_path / f"{number}.sqlite", tmp_path / f"out{number}"
        for use in (
            lambda database=database: store.add(database, facts.read(run)),
            lambda out=out: print_table(merge(out, [run]).record, screen()),
        ):
            try:
                use()
                kept += 1
            except HarnessError as error:
                messages.append(str(error))
        if database.exists():
            series, verdicts = trend.series(store.measured(database)), trend.verdicts(store.concluded(database))
            show.write_text(verdicts, series, screen())
            show.write_json(1, verdicts, series, screen())
    assert kept > 20
    assert len(messages) > 20
    assert all(str(path) in message for message in messages)
