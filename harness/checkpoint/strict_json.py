"""A JSON reader that says at which byte a text goes wrong, and refuses what others let pass: keys that are there twice.

`json` and msgspec take the last of two equal keys without a word, and name no offset for what is valid JSON but not
what was asked for. This reader is for small texts, and for saying what is wrong with large ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

__all__ = ["JsonError", "Scanner", "shorten"]

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    # Python's own writer, and so transformers, writes these three; they are not JSON.
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_WORD = re.compile("|".join(_WORDS))
_DEPTH_LIMIT = 64
_DIGITS_LIMIT = 400
"""No number of a config or header is longer; Python refuses to convert 4300 digits, and takes quadratic time below."""


class JsonError(ValueError):
    """What is wrong, and at which byte of the text."""

    def __init__(self, why: str, offset: int) -> None:
        super().__init__(f"{why} (byte {offset})")
        self.why = why
        self.offset = offset


def shorten(text: object, limit: int = 80) -> str:
    """Return a quoted text that is safe to print, cut to `limit` characters."""
    shown = ascii(text)
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


class Scanner:
    """Reads one JSON text from left to right. Every method raises `JsonError` at the first byte that is wrong.

    Raises `JsonError` on construction when the text is not UTF-8.
    """

    def __init__(self, raw: bytes) -> None:
        try:
            self._text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise JsonError("not UTF-8", error.start) from None
        self._at = 0

    def fail(self, why: str, at: int | None = None) -> NoReturn:
        """Raise `JsonError`. `at` is a place that `place` returned; the default is the current one."""
        raise JsonError(why, len(self._text[: self._at if at is None else at].encode("utf-8")))

    def place(self) -> int:
        """Return the place of the next token, for `fail`."""
        match = _SPACE.match(self._text, self._at)
        assert match is not None  # noqa: S101 -- the pattern matches the empty string
        self._at = match.end()
        return self._at

    def take(self, allowed: str) -> str:
        """Read one of these characters."""
        at = self.place()
        found = self._text[at : at + 1]
        if not found or found not in allowed:
            wanted = " or ".join(map(repr, allowed))
            self.fail(f"{wanted} expected, found {shorten(found) if found else 'the end'}")
        self._at += 1
        return found

    def end(self) -> None:
        """Require that nothing but space is left."""
        if self.place() != len(self._text):
            self.fail("text after the end of the JSON value")

    def string(self) -> str:
        """Read a string."""
        self.take('"')
        at = self._at - 1
        value: str
        try:
            value, self._at = _DECODER.raw_decode(self._text, at)
        except json.JSONDecodeError as error:
            self.fail(error.msg, error.pos)
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            self.fail("half of a surrogate pair", at)
        return value

    def whole(self) -> int:
        """Read an integer from 0 up."""
        at = self.place()
        match = _NUMBER.match(self._text, at)
        if match is None or match[1] or match[2] or match[0][0] == "-":
            self.fail(f"an integer from 0 up expected, found {shorten(self._text[at : at + 12])}")
        if len(match[0]) > _DIGITS_LIMIT:
            self.fail(f"a number of {len(match[0])} digits")
        self._at = match.end()
        return int(match[0])

    def wholes(self, limit: int) -> tuple[int, ...]:
        """Read an array of at most `limit` integers from 0 up."""
        self.take("[")
        if self._text[self.place() : self._at + 1] == "]":
            self._at += 1
            return ()
        found = [self.whole()]
        while self.take(",]") == ",":
            if len(found) == limit:
                self.fail(f"an array of more than {limit} integers")
            found.append(self.whole())
        return tuple(found)

    def members(self) -> Iterator[tuple[str, int]]:
        """Read an object: yield each key and its place; the caller must read the value before it goes on."""
        self.take("{")
        seen: set[str] = set()
        if self._text[self.place() : self._at + 1] == "}":
            self._at += 1
            return
        while True:
            at = self.place()
            key = self.string()
            if key in seen:
                self.fail(f"the key {shorten(key)} is there twice", at)
            seen.add(key)
            self.take(":")
            yield key, at
            if self.take(",}") == "}":
                return

    def value(self, depth: int = 0) -> Any:
        """Read any value, nested at most 64 deep."""
        at = self.place()
        if depth > _DEPTH_LIMIT:
            self.fail(f"nested more than {_DEPTH_LIMIT} deep")
        match self._text[at : at + 1]:
            case "{":
                return {key: self.value(depth + 1) for key, _ in self.members()}
            case "[":
                return self._array(depth)
            case '"':
                return self.string()
            case _:
                return self._scalar()

    def _array(self, depth: int) -> list[Any]:
        self.take("[")
        found: list[Any] = []
        if self._text[self.place() : self._at + 1] == "]":
            self._at += 1
            return found
        while True:
            found.append(self.value(depth + 1))
            if self.take(",]") == "]":
                return found

    def _scalar(self) -> Any:
        if match := _WORD.match(self._text, self._at):
            self._at = match.end()
            return _WORDS[match[0]]
        number = _NUMBER.match(self._text, self._at)
        if number is None:
            found = self._text[self._at : self._at + 12]
            self.fail(f"a value expected, found {shorten(found) if found else 'the end'}")
        if len(number[0]) > _DIGITS_LIMIT:
            self.fail(f"a number of {len(number[0])} digits")
        self._at = number.end()
        return float(number[0]) if number[1] or number[2] else int(number[0])
