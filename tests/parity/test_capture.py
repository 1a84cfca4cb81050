"""What was handed over is put in the order of its prompts, and what is missing is said."""

from pathlib import Path

import numpy as np
import pytest

from harness.errors import EvidenceError
from harness.parity.capture import Asked, arrange
from harness.probe.features import Handed

HERE = Path("evidence")


def handed(start, tokens, value=0.0):
    """Rows of one proposal: the feature of a row is its token and `value`."""
    features = np.array([[token, value] for token in tokens], np.float32)
    return Handed("f", features, np.array(tokens), np.arange(start, start + len(tokens)))


READY = [handed(0, [1, 2, 3, 5]), handed(4, [6, 7])]
ASKED = [Asked("a", (1, 2, 3), (4, 5, 6, 7)), Asked("b", (1, 2), (9, 8))]
SEEN = [
    *READY,
    handed(0, [1, 2, 3]),
    handed(3, [4, 5, 90]),  # the draft 90 was refused
    handed(5, [6, 91, 7], 1.0),  # 91 was refused: what follows it was computed after a token that is not there
    handed(0, [1, 2]),
    handed(2, [9, 8, 8]),
]


def test_rows_of_refused_drafts_are_left_out():
    (a, b), rejected = arrange(SEEN, ASKED, HERE)
    assert a.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert a.features[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert (a.prompt_tokens, a.token_ids) == (3, (1, 2, 3, 4, 5, 6, 7))
    assert b.positions.tolist() == [0, 1, 2, 3]
    assert rejected == 1 + 2 + 1


def test_a_prompt_in_chunks_is_one_sequence():
    (a, _), _ = arrange([handed(0, [1, 2]), handed(2, [3]), *SEEN[3:]], ASKED, HERE)
    assert a.features[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_prompt_that_no_proposal_was_made_on():
    with pytest.raises(EvidenceError, match="no proposal was made on the 2 tokens of prompt c"):
        arrange(SEEN, [*ASKED, Asked("c", (40, 41), (1,))], HERE)
    with pytest.raises(EvidenceError, match="no proposal was made"):
        arrange([], ASKED, HERE)


def test_a_position_that_was_never_handed_over():
    with pytest.raises(EvidenceError, match=r"prompt a: 1 of 3 positions .* the first is 2"):
        arrange([*READY, handed(0, [1, 2]), handed(3, [4]), *SEEN[5:]], [ASKED[0]], HERE)


def test_rows_of_several_requests_in_one_step():
    mixed = Handed("f7", np.zeros((4, 2)), np.array([1, 2, 1, 2]), np.array([0, 1, 0, 1]))
    with pytest.raises(EvidenceError, match=r"f7: positions .* do not follow"):
        arrange([mixed], ASKED, HERE)
