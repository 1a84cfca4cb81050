"""Markdown for a pull request, read back by a Markdown parser."""

import re

import pytest
from markdown_it import MarkdownIt

from harness.report.markdown import render
from tests.report.hostile import MARK, PAYLOADS, poisoned
from tests.report.records import case, compared, failing, finding, green, invalid, judgement, passing, record

PARSER = MarkdownIt("commonmark", {"linkify": False}).enable(["table", "strikethrough"])


def tokens(text):
    for token in PARSER.parse(text):
        yield token
        yield from token.children or ()


def test_it_answers_in_the_same_order():
    text = render(failing())
    order = ["draftgate: FAIL", "small on vllm 0.32.0", "| pair | engine version |", "**Cause:**", "**Remedy:** rename"]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)


@pytest.mark.parametrize("made", [passing, failing, invalid, record])
def test_the_table_has_a_row_per_case(made):
    rows = [token for token in tokens(render(made())) if token.type == "tr_open"]
    assert len(rows) == 1 + len(made()["cases"])


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("made", [failing, invalid])
def test_text_from_outside_stays_text(made, payload):
    text = render(poisoned(made(), f" {payload}"))
    text.encode("utf-8")
    assert MARK in text
    found = list(tokens(text))
    tame = list(tokens(render(poisoned(made(), " tame"))))
    inert = ("text", "text_special", "html_inline")
    assert [each.type for each in found if each.type not in inert] == [
        each.type for each in tame if each.type not in inert
    ]
    assert all(each.content == "<!-- -->" for each in found if each.type == "html_inline")
    assert not re.search(r"@EVIL|#123|GH-7|www\.|://|[^\\]\$x|\u202e|\x1b", text)


def kinds(text):
    return [each.type for each in tokens(text) if each.type not in ("text", "text_special", "html_inline")]


@pytest.mark.parametrize(
    "name",
    ["# x", "## x", "#", "- x", "-", "---", "- - -", "+ x", "* x", "***", "1. x", "7) x", "1.", "= x", "===", "> x",
     "~~~", "```", "<b>", "<!-- x", "[x]: /y", "|x|", "    x", "::error::x", ":--"],
)  # fmt: skip
def test_a_name_that_begins_a_line_makes_no_block(name):
    text = render(record(case(name)))
    assert kinds(text) == kinds(render(record(case("x"))))
    assert name.strip() in "".join(each.content for each in tokens(text) if each.type in ("text", "text_special"))
    assert not re.search(r"^\s*::|##\[", text, re.MULTILINE)


def test_what_does_not_count_says_so():
    text = render(compared(failing()["cases"][1]["judgements"], green(), "PASS"))
    assert "FAIL WGT003 (of the old release, not counted): 2 of 5 keys" in text


def test_notes_leave_room_for_reasons():
    red = [judgement("weights", finding("WGT003", "FAIL", "red", cause="the cause"))]
    others = [case(f"pair-{index}", not_asked={"metrics": "y" * 900 + str(index)}) for index in range(550)]
    text = render(record(case(judgements=red), *others))
    assert len(text) < 65_536
    assert "**Cause:** the cause" in text
    assert re.search(r"\d+ more notes are in the record", text)


@pytest.mark.parametrize("text", ["@", "&", "<", "#1", "\u202e", "\x00", "a://"])
def test_text_that_grows_as_markdown_leaves_room_for_reasons(text):
    made = poisoned(failing(), text * 2_000)
    assert len(render(made)) < 65_536
    assert "### \u274c FAIL WGT003" in render(made)


def test_a_pull_requests_comment_has_room_for_it():
    red = [judgement("weights", *(finding("WGT003", "FAIL", f"{n} " + "y" * 900, cause="x" * 900) for n in range(99)))]
    text = render(record(case(judgements=red)))
    assert len(text) < 65_536
    assert re.search(r"\d+ more reasons are in the record", text)
    assert len(render(record(*(case("z" * 500 + str(n)) for n in range(200))))) < 65_536
