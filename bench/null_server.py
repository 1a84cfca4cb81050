"""A server that answers every OpenAI completion at once with the same bytes: what is left is the client's own cost.

One process, one epoll loop, no parsing beyond the length of a request, and answers that are made before the first
request comes. It prints its port and serves until its standard input closes.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import socket
import sys

__all__ = ["Answers", "serve"]

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": ?true')


class Answers:
    """The bytes to send for each kind of request: an answer of `tokens` tokens; streamed, one event each."""

    def __init__(self, tokens: int) -> None:
        self._usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
        models = {
            "object": "list",
            "data": [{"id": "null", "object": "model", "owned_by": "bench", "max_model_len": 4096}],
        }
        self._models = _whole(models)
        self._made = {
            (chat, stream, usage): self._make(tokens, chat=chat, stream=stream, usage=usage)
            for chat in (False, True)
            for stream in (False, True)
            for usage in (False, True)
        }

    def to(self, head: bytes, body: bytes) -> tuple[bytes, ...]:
        """Return the pieces of the answer to one request; each is sent by a call of its own, as tokens are."""
        if head.startswith(b"GET"):
            return self._models
        return self._made[b"/chat/" in head.partition(b"\r\n")[0], bool(_STREAM.search(body)), b"include_usage" in body]

    def _make(self, tokens: int, *, chat: bool, stream: bool, usage: bool) -> tuple[bytes, ...]:
        if not stream:
            text = " word" * tokens
            said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choice = {"index": 0, "finish_reason": "length", "logprobs": None, **said}
            return _whole(self._frame(chat, "chat.completion", [choice]) | {"usage": self._usage})
        events = []
        for number in range(tokens):
            said = {"delta": {"content": " word"}} if chat else {"text": " word"}
            finish = "length" if number == tokens - 1 else None
            choice = {"index": 0, "finish_reason": finish, "logprobs": None, **said}
            events.append(json.dumps(self._frame(chat, "chat.completion.chunk", [choice])))
        if usage:
            events.append(json.dumps(self._frame(chat, "chat.completion.chunk", []) | {"usage": self._usage}))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        pieces = [_chunk(f"data: {event}\n\n".encode()) for event in [*events, "[DONE]"]]
        return (head, *pieces[:-1], pieces[-1] + b"0\r\n\r\n")

    @staticmethod
    def _frame(chat: bool, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": "chatcmpl-null" if chat else "cmpl-null",
            "object": kind if chat else "text_completion",
            "created": 1,
            "model": "null",
            "choices": choices,
        }


def _whole(body: dict[str, object]) -> tuple[bytes]:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\nserver: null\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return (head.encode() + data,)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def serve(listener: socket.socket, answers: Answers, *, until: int) -> None:
    """Answer on `listener` until the descriptor `until` can be read. Requests are whole before they are answered."""
    loop = select.epoll()
    loop.register(listener, select.EPOLLIN)
    loop.register(until, select.EPOLLIN | select.EPOLLHUP)
    connections: dict[int, socket.socket] = {}
    waiting: dict[int, bytes] = {}
    while True:
        for descriptor, _ in loop.poll():
            if descriptor == until:
                return
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[connection.fileno()] = connection
                waiting[connection.fileno()] = b""
                loop.register(connection, select.EPOLLIN)
                continue
            connection = connections[descriptor]
            try:
                data = connection.recv(262_144)
                rest = _answer(connection, waiting[descriptor] + data, answers) if data else b""
            except OSError:
                data = rest = b""
            if data:
                waiting[descriptor] = rest
            else:
                loop.unregister(descriptor)
                del connections[descriptor], waiting[descriptor]
                connection.close()


def _answer(connection: socket.socket, data: bytes, answers: Answers) -> bytes:
    """Answer the requests that are whole, and return what is left over."""
    while (end := data.find(b"\r\n\r\n")) >= 0:
        head = data[: end + 2]
        length = _LENGTH.search(head)
        whole = end + 4 + (int(length[1]) if length else 0)
        if len(data) < whole:
            break
        for piece in answers.to(head, data[end + 4 : whole]):
            connection.sendall(piece)
        data = data[whole:]
    return data


def main() -> int:
    """Print the port, then serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="tokens of every answer (default: 16)")
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)
        serve(listener, Answers(arguments.tokens), until=sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
