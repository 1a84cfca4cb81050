"""Markdown for a pull request, read back by a Markdown parser."""

import re

import pytest
from markdown_it import MarkdownIt

from harness.report.markdown import render
from tests.report.hostile import MARK, PAYLOADS, poisoned
from tests.report.records import case, failing, finding, invalid, judgement, passing, record

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


def test_a_pull_requests_comment_has_room_for_it():
    red = [judgement("weights", *(finding("WGT003", "FAIL", f"{n} " + "y" * 900, cause="x" * 900) for n in range(99)))]
    text = render(record(case(judgements=red)))
    assert len(text) < 65_536
    assert re.search(r"\d+ more reasons are in the record", text)
    assert len(render(record(*(case("z" * 500 + str(n)) for n in range(200))))) < 65_536
