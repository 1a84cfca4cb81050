"""Any server that speaks OpenAI's API, as the load sees it: how many tokens came, and when."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any

import msgspec
import requests

from harness.engines.http import HttpEndpoint
from harness.engines.transport import Reply
from harness.errors import EvidenceError, ServerError
from harness.measure.endpoint import Prompt

__all__ = ["Answered", "OpenAiEndpoint"]


@dataclasses.dataclass(frozen=True)
class Answered:
    """One answer, without its text; the fields are those of `harness.measure.endpoint.Generation`."""

    tokens: int
    seconds: float
    first_token_s: float | None
    send_s: float
    receive_s: float | None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    delta: _Delta | None = None

    @property
    def has_token(self) -> bool:
        """Whether a token is in it: always in a completion, but a chat begins with a role and nothing else."""
        return self.delta is None or bool(self.delta.content or self.delta.reasoning_content or self.finish_reason)


class _Usage(msgspec.Struct):
    completion_tokens: Annotated[int, msgspec.Meta(ge=0)]


class _Whole(msgspec.Struct):
    """An answer that is not streamed, as far as it is read."""

    usage: _Usage


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_DECODER = msgspec.json.Decoder(_Event)


class OpenAiEndpoint(HttpEndpoint):
    """`/v1/completions` for token ids and text, `/v1/chat/completions` for messages; greedy.

    With `stream`, the time to the first token is measured. It costs the client more, so it is not done unasked.
    """

    def __init__(self, base_url: str, *, model: str = "", stream: bool = False) -> None:
        super().__init__(base_url.rstrip("/").removesuffix("/v1"), base_url, speculative=False)
        self._stream = stream
        self.model = model or self._first_model()

    def generate(self, prompt: Prompt, max_tokens: int) -> Answered:
        """Answer `prompt`. Raises ServerError if the server refuses, EvidenceError if it does not count tokens."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        if prompt.ignore_eos:
            body["ignore_eos"] = True
        if prompt.messages is not None:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": role, "content": content} for role, content in prompt.messages]
        else:
            path = "/v1/completions"
            body["prompt"] = prompt.text if prompt.token_ids is None else prompt.token_ids
        if not self._stream:
            answer = self._post(path, body)
            try:
                tokens = msgspec.convert(answer.json, _Whole).usage.completion_tokens
            except msgspec.ValidationError as error:
                raise self._uncounted(path, str(error)) from error
            return Answered(tokens, answer.seconds, None, answer.send_s, answer.receive_s)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        reply = self._send(path, body, first=_first_token)
        counted = _usage(reply)
        if counted is None:
            raise self._uncounted(path, "no event has it")
        if reply.first is None:
            raise ServerError(f"{self.label}: {path} streamed no token: {_shown(reply)}")
        end = time.perf_counter()
        receive_s = None if reply.arrived is None else end - reply.arrived
        return Answered(counted, end - start, reply.first - start, reply.sent - start, receive_s)

    def _uncounted(self, path: str, why: str) -> EvidenceError:
        return EvidenceError(
            f"{self.label}: the answer of {path} has no usage.completion_tokens: {why}",
            remedy="tokens are counted by the server, which knows its tokenizer: use one that reports usage",
        )

    def _first_model(self) -> str:
        answer = self._read("/v1/models", remedy="check that the server is up and speaks OpenAI's API, or give --model")
        try:
            return str(answer.json()["data"][0]["id"])
        except (requests.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise EvidenceError(f"{self.label}: /v1/models names no model", remedy="give --model") from error


def _events(content: bytes) -> list[bytes]:
    """Return the data of the whole events in `content`; the last is left out unless its end has come."""
    return [
        event.removeprefix(b"data:").strip()
        for event in content.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
        if event.startswith(b"data:")
    ]


def _decoded(event: bytes) -> _Event:
    try:
        return _DECODER.decode(event)
    except msgspec.MsgspecError:  # "[DONE]", or an extension of the server's
        return _Event()


def _first_token(content: bytes) -> bool:
    return any(choice.has_token for event in _events(content) for choice in _decoded(event).choices)


def _usage(reply: Reply) -> int | None:
    """Return the tokens that the server counted: the last events say so, the others are not looked at."""
    for event in reversed(_events(reply.content[-4096:])):
        usage = _decoded(event).usage
        if usage is not None:
            return usage.completion_tokens
    return None


def _shown(reply: Reply) -> str:
    return reply.content[:400].decode(errors="replace")
