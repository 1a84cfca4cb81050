"""`draftgate load`: what it sends, what it prints, and that it says when the figures are its own."""

from __future__ import annotations

import json
import time

import pytest

from harness import cli
from harness.load import report
from harness.load.report import Report
from harness.measure.load import ClosedLoop, Load, OpenLoop, RequestRecord
from harness.verdict import Verdict
from tests.load.conftest import completion


def record(seconds=1.0, before=0.0, after=0.0, first=None, tokens=4):
    return RequestRecord("p", 0.0, seconds, tokens, first, 0.0, before, after)


def made(*requests, arrival=None, ignore_eos=True):
    return Report("http://x", "m", arrival or ClosedLoop(1), 4, ignore_eos, Load(10.0, 0.1, requests))


def test_a_load_is_sent_and_recorded(serve, capsys):
    server = serve(lambda *_: completion(4))
    status = cli.main(["load", server.url, "--requests", "6", "--concurrency", "2", "--max-tokens", "4", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert status == {"PASS": 0, "INVALID": 3}[data["verdict"]]
    assert len(data["requests"]) == len(server.bodies) == 6
    assert data["tokens"] == 24
    assert data["arrival"] == {"loop": "closed", "concurrency": 2}
    assert data["headroom"]["before"]["max"] >= data["headroom"]["before"]["median"] >= 0
    assert {len(body["prompt"]) for body in server.bodies} == {128}


def test_the_same_seed_sends_the_same(serve, capsys):
    server = serve(lambda *_: completion())
    for _ in range(2):
        cli.main(["load", server.url, "--requests", "3", "--prompt-tokens", "8", "--vocabulary", "50", "--seed", "4"])
    assert server.bodies[:3] == server.bodies[3:]
    assert all(token < 50 for body in server.bodies for token in body["prompt"])


def test_prompts_of_a_file_are_sent_as_chats_in_turn(serve, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    server = serve(lambda *_: completion())
    cli.main(["load", server.url, "--prompts", str(tmp_path / "p.jsonl"), "--requests", "3", "--stop-at-eos"])
    assert [body["messages"][0]["content"] for body in server.bodies] == ["one", "two", "one"]
    assert not any("ignore_eos" in body for body in server.bodies)


def test_an_open_loop_is_recorded_with_its_seed(serve, capsys):
    server = serve(lambda *_: completion())
    cli.main(["load", server.url, "--requests", "3", "--rate", "500", "--seed", "9", "--json"])
    assert json.loads(capsys.readouterr().out)["arrival"] == {"loop": "open", "rate": 500.0, "seed": 9}


def test_a_client_that_is_the_limit_makes_it_invalid(serve, capsys, monkeypatch):
    def slowly(data):
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            pass
        return encode(data)

    from harness.engines import http

    encode = http.msgspec.json.encode
    monkeypatch.setattr(http.msgspec.json, "encode", slowly)
    url = serve(lambda *_: completion(4)).url
    assert cli.main(["load", url, "--requests", "5", "--max-tokens", "4"]) == 3
    assert "the load client" in capsys.readouterr().out


@pytest.mark.parametrize(("tokens", "more"), [(0, []), (0, ["--stop-at-eos"]), (3, []), (65, ["--stop-at-eos"])])
def test_a_load_that_got_other_tokens_than_it_asked_for_is_invalid(serve, capsys, tokens, more):
    assert cli.main(["load", serve(lambda *_: completion(tokens)).url, "--requests", "3", *more]) == 3
    said = capsys.readouterr().out
    assert "INVALID: 3 of 3 answers have not the tokens asked for" in said
    assert f"has {tokens}, expected {'1 to ' if more else ''}64" in said


def test_one_answer_of_a_wrong_length_makes_a_load_invalid():
    whole = [record() for _ in range(200)]
    assert made(*whole, record(tokens=3), ignore_eos=False).verdict is Verdict.PASS
    assert "1 of 201" in made(*whole, record(tokens=3)).invalid
    for ignore_eos in (True, False):
        for tokens in (0, 5):
            assert made(*whole, record(tokens=tokens), ignore_eos=ignore_eos).verdict is Verdict.INVALID


def test_a_slow_tail_of_the_clients_is_invalid():
    quick = [record() for _ in range(200)]
    assert made(*quick).verdict is Verdict.PASS
    tail = [record(before=0.2) for _ in range(3)]
    assert made(*quick, *tail).verdict is Verdict.INVALID
    assert "99th percentile" in made(*quick, *tail).invalid
    # One in a thousand is seen in `max`, and does not move the 99th percentile.
    assert made(*quick, *tail[:1]).verdict is Verdict.PASS


def test_the_text_says_what_a_person_asks_for():
    text = made(record(first=0.1), arrival=OpenLoop(2.5, 3)).as_text()
    assert "open loop of 2.5 a second, seed 3" in text
    assert "first token   median 100.0 ms" in text
    assert "per token     median 300.0 ms" in text
    assert "client wait   0.00% of their time" in text


def test_a_server_that_is_not_there(capsys):
    assert cli.main(["load", "http://127.0.0.1:1"]) == 3
    assert cli.main(["load", "http://127.0.0.1:1", "--model", "m"]) == 3
    assert "remedy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["https://host"],
        ["host:8000"],
        ["http://host:8000/v1/completions"],
        ["http://127.0.0.1:1", "--requests", "0"],
        ["http://127.0.0.1:1", "--concurrency", "0"],
        ["http://127.0.0.1:1", "--rate", "-1"],
        ["http://127.0.0.1:1", "--prompts", "gone.jsonl"],
    ],
)
def test_bad_input(argv, capsys):
    assert cli.main(["load", *argv]) == 2
    assert "remedy" in capsys.readouterr().err


def test_the_schema_is_documented():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs/load.md").read_text()
    assert f"`schema` ({report.SCHEMA})" in text
    missing = [name for name in made(record()).as_data() if f"`{name}`" not in text and name != "schema"]
    assert not missing
