"""An endpoint of OpenAI's API: tokens as the server counts them, times as the kernel saw them, and few connections."""

from __future__ import annotations

import json
import threading
import time
import types

import pytest
import requests

from harness.engines import http, transport
from harness.errors import EvidenceError, ServerError
from harness.load import openai
from harness.load.openai import OpenAiEndpoint
from harness.measure.endpoint import Prompt
from tests.load.conftest import completion, event

IDS = Prompt("p", token_ids=(1, 2, 3))
CHAT = Prompt("c", messages=(("user", "hello"),), ignore_eos=False)
PAUSE = 0.05
"""Seconds that something takes at least. Nothing is asserted of how long anything takes at most."""


def take(seconds: float) -> None:
    """Keep the processor busy: a thread that sleeps lets others run."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_ids_go_to_completions_and_messages_to_the_chat(serve):
    server = serve(lambda path, body: completion(7 if path == "/v1/completions" else 5))
    endpoint = OpenAiEndpoint(f"{server.url}/v1/")
    assert (endpoint.generate(IDS, 9).tokens, endpoint.generate(CHAT, 9).tokens) == (7, 5)
    first, second = server.bodies
    assert first == {"model": "one", "max_tokens": 9, "temperature": 0, "ignore_eos": True, "prompt": [1, 2, 3]}
    assert second["messages"] == [{"role": "user", "content": "hello"}]
    assert "ignore_eos" not in second


def test_one_connection_serves_all_requests_and_an_old_one_is_not_trusted(serve, monkeypatch):
    server = serve(lambda *_: completion())
    endpoint = OpenAiEndpoint(server.url, model="m")
    for _ in range(5):
        endpoint.generate(IDS, 4)
    assert server.connections == 1
    monkeypatch.setattr(http, "_IDLE_S", 0.0)
    endpoint.generate(IDS, 4)
    assert server.connections == 2


def test_as_many_connections_as_requests_at_once(serve):
    gate = threading.Barrier(3)

    def answer(*_):
        gate.wait(30)
        return completion()

    server = serve(answer)
    endpoint = OpenAiEndpoint(server.url, model="m")
    for _ in range(2):
        threads = [threading.Thread(target=endpoint.generate, args=(IDS, 4)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert server.connections == 3


def test_a_slow_server_is_not_laid_at_the_clients_door(serve, monkeypatch):
    sent = threading.Event()

    class Told(transport._Connection):
        def getresponse(self):
            sent.set()
            return super().getresponse()

    def answer(*_):
        assert sent.wait(30), "a client that is late to see its request sent has spent that time itself"
        take(PAUSE)
        return completion()

    monkeypatch.setattr(transport._Pool, "ConnectionCls", Told)
    made = OpenAiEndpoint(serve(answer).url, model="m").generate(IDS, 4)
    assert made.seconds - made.send_s - made.receive_s >= PAUSE


def test_a_client_that_finds_its_answer_late_is_not_laid_at_the_servers_door(serve, monkeypatch):
    """The answer is there before the client's thread gets to read it, as when another thread holds the lock."""
    server = serve(lambda *_: completion())

    class Late(transport._Connection):
        def getresponse(self):
            assert server.answered.wait(30)
            take(PAUSE)
            return super().getresponse()

    monkeypatch.setattr(transport._Pool, "ConnectionCls", Late)
    assert OpenAiEndpoint(server.url, model="m").generate(IDS, 4).receive_s >= PAUSE


def test_a_slow_client_before_sending_and_after_receiving(serve, monkeypatch):
    endpoint = OpenAiEndpoint(serve(lambda *_: completion()).url, model="m")
    endpoint.generate(IDS, 4)
    decode, encode = http.msgspec.json.decode, http.msgspec.json.encode
    monkeypatch.setattr(http.msgspec.json, "encode", lambda body: (take(PAUSE), encode(body))[1])
    assert endpoint.generate(IDS, 4).send_s >= PAUSE
    monkeypatch.setattr(http.msgspec.json, "encode", encode)
    monkeypatch.setattr(http.msgspec.json, "decode", lambda content: (take(PAUSE), decode(content))[1])
    assert endpoint.generate(IDS, 4).receive_s >= PAUSE


@pytest.mark.parametrize("step", [1000.0, -1000.0])
def test_a_wall_clock_that_is_set_hides_no_wait_and_makes_no_time_negative(serve, monkeypatch, step):
    """The kernel stamps by the wall clock, which is set after the answer came and before it is read."""
    server = serve(lambda *_: completion())
    endpoint = OpenAiEndpoint(server.url, model="m")
    endpoint.generate(IDS, 4)
    server.answered.clear()
    wall = types.SimpleNamespace(time=time.time, perf_counter=time.perf_counter, monotonic=time.monotonic)

    class SetMeanwhile(transport._Socket):
        def recv_into(self, *args):
            assert server.answered.wait(30)
            take(PAUSE)
            wall.time = lambda: time.time() + step
            return super().recv_into(*args)

    monkeypatch.setattr(transport, "time", wall)
    monkeypatch.setattr(transport, "_Socket", SetMeanwhile)
    endpoint._idle.clear()
    made = endpoint.generate(IDS, 4)
    assert made.receive_s >= PAUSE
    assert 0 <= made.send_s <= made.seconds
    assert made.receive_s <= made.seconds


def test_a_kernel_that_does_not_say_when_leaves_the_wait_unmeasured(serve, monkeypatch):
    monkeypatch.setattr(transport, "_SO_TIMESTAMPNS", 2)  # SO_REUSEADDR
    monkeypatch.setattr(transport, "_begin_stamping", lambda: None)
    assert OpenAiEndpoint(serve(lambda *_: completion()).url, model="m").generate(IDS, 4).receive_s is None


def stream(*texts, usage=3):
    events = [event(choices=[{"text": text, "finish_reason": None}]) for text in texts]
    return [*events, event(choices=[], usage={"completion_tokens": usage}), b"data: [DONE]\n\n"]


def test_a_stream_tells_its_first_token(serve, monkeypatch):
    seen, look = threading.Event(), openai._first_token

    def first_token(content):
        found = look(content)
        if found:
            seen.set()
        return found

    def answer(*_):
        first, *rest = stream("a", "b", "c")
        yield first
        assert seen.wait(30)
        take(PAUSE)
        yield from rest

    monkeypatch.setattr(openai, "_first_token", first_token)
    server = serve(answer)
    made = OpenAiEndpoint(server.url, model="m", stream=True).generate(IDS, 3)
    assert made.tokens == 3
    assert made.seconds - made.receive_s - made.first_token_s >= PAUSE
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_a_role_is_no_token(serve):
    def answer(*_):
        yield event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        take(PAUSE)
        yield event(choices=[{"delta": {"content": "hi"}}])
        yield event(choices=[], usage={"completion_tokens": 1})

    made = OpenAiEndpoint(serve(answer).url, model="m", stream=True).generate(CHAT, 3)
    assert made.first_token_s >= PAUSE


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, *({"usage": each} for each in (None, 4, [], {}, {"completion_tokens": "4"}))])
def test_a_server_that_counts_no_tokens(serve, stream, more):
    data = {"choices": [{"text": "x"}], **more}
    answer = [event(**data)] if stream else json.dumps(data).encode()
    with pytest.raises(EvidenceError, match="usage"):
        OpenAiEndpoint(serve(lambda *_: answer).url, model="m", stream=stream).generate(IDS, 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [True, -1, 4.5])
def test_what_is_no_count_is_not_counted(serve, stream, tokens):
    data = {"choices": [{"text": "x"}], "usage": {"completion_tokens": tokens}}
    answer = [event(**data)] if stream else json.dumps(data).encode()
    with pytest.raises(EvidenceError, match="completion_tokens"):
        OpenAiEndpoint(serve(lambda *_: answer).url, model="m", stream=stream).generate(IDS, 4)


def test_a_stream_without_a_token(serve):
    answer = [event(choices=[], usage={"completion_tokens": 0})]
    with pytest.raises(ServerError, match="no token"):
        OpenAiEndpoint(serve(lambda *_: answer).url, model="m", stream=True).generate(IDS, 4)


@pytest.mark.parametrize(
    ("answer", "words"), [(503, "answered 503"), (b"<html>", "not JSON"), (b"[]", "no object"), (b"null", "no object")]
)
def test_a_refusal_and_nonsense_are_told(serve, answer, words):
    with pytest.raises(ServerError, match=words):
        OpenAiEndpoint(serve(lambda *_: answer).url, model="m").generate(IDS, 4)


def test_a_cut_answer_is_a_lost_connection(serve):
    server = serve(lambda *_: (completion(), len(completion()) + 10))
    with pytest.raises(requests.RequestException):
        OpenAiEndpoint(server.url, model="m").generate(IDS, 4)
