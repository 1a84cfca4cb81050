"""Text from outside is shown, all of it, and does nothing."""

import math

import pytest

from harness.report.text import MOST, number, one_line, terminal, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, *with* <marks> and \u00fcmlauts", "plain, *with* <marks> and \u00fcmlauts"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;https://example.org\x07here\x1b]8;;\x1b\\", "here"),
        ("\x1b]0;never closed", "0;never closed"),
        ("bell\x07 null\x00", "bell\\x07 null\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("half\ud800", "half\\ud800"),
        ("one\r\ntwo\n\tthree", "one\ntwo\n    three"),
        ("over\rwritten", "over\\rwritten"),
    ],
)
def test_visible(text, shown):
    assert visible(text) == shown


def test_what_is_cut_says_so():
    assert visible("x" * (MOST + 7)).endswith("x ... (7 more characters in record.json)")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("    cause: \x1b]0;x\x07a\nb", "    cause: a b"),
        ("x\n::error::y", "x ::error::y"),
        ("::error::y", ": :error::y"),
        (" \r\n\t::error::y", "      : :error::y"),
        ("x ##[error]y ###[z]", "x ## [error]y ### [z]"),
        ("\u200b::error::y", "\\u200b::error::y"),
    ],
)
def test_what_is_printed_is_one_line_and_no_order_to_a_runner(text, shown):
    assert terminal(text) == shown


def test_one_line():
    assert one_line(" a\n\n b\tc ") == "a b c"
    assert one_line("a " * 10, 5) == "a a a ..."


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2.34567, "2.346"), (7, "7"), (0.0, "0"), (math.nan, "not a number"), (math.inf, "infinite"),
        (-math.inf, "minus infinite"), (None, "none"), (True, "True"), ("x\x00", "x\\x00"), (10**400, str(10**400)),
    ],
)  # fmt: skip
def test_number(value, shown):
    assert number(value) == shown
