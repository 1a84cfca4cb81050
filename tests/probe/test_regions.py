"""The interval map agrees with a plain array of marks, whatever is written where."""

from __future__ import annotations

import torch
from draftgate_probe.regions import PIECES, Regions, Share, View
from hypothesis import given
from hypothesis import strategies as st

from harness.probe.extent import covered

SIZE = 40
writes = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE), st.sampled_from([(), ("a",), ("b",), ("a", "b")])),
    max_size=20,
)


@given(writes, st.integers(0, SIZE - 1), st.integers(1, SIZE), st.sampled_from([1, 2, 4]))
def test_counts_equal_a_plain_array(operations, start, length, itemsize):
    regions, marks = Regions(), [None] * SIZE
    for low, wanted, keys in operations:
        size = min(wanted, SIZE - low)
        regions.write(View(low, (size,), (1,), itemsize), frozenset(keys))
        marks[low : low + size] = [frozenset(keys)] * size
    length = min(length, SIZE - start)
    count = regions.count(View(start, (length,), (1,), itemsize))
    seen = marks[start : start + length]
    assert count.written == sum(bool(mark) for mark in seen)
    assert count.filled == sum(mark == frozenset() for mark in seen)
    assert count.keys == frozenset().union(*(mark for mark in seen if mark))


def test_runs_of_a_transposed_view_cover_its_elements():
    tensor = torch.zeros(6, 8).t()[2:5]
    covered = {byte for low, high in View.of(tensor).runs() for byte in range(low, high, 4)}
    assert len(covered) == tensor.numel()


def test_a_box_that_reaches_beyond_a_view_is_an_upper_bound_and_says_so():
    regions = Regions()
    base = torch.zeros(3000, 4)
    regions.write(View.of(base[:, :2]), frozenset({"a"}))
    count = regions.count(View.of(base[:1000]))
    assert not count.exact
    assert regions.count(View.of(base)).written == 6000


SLICES = st.tuples(*(st.slices(size) for size in (4, 6, 5)))


@given(st.lists(SLICES, max_size=6), st.permutations([0, 1, 2]))
def test_pieces_of_slices_cover_what_the_slices_do(slices, order):
    """Where it can be told: as much as a plain array of marks says, whatever the views' shapes and order."""
    whole, marks = torch.zeros(4, 6, 5), torch.zeros(4, 6, 5, dtype=torch.bool)
    share = Share(whole.numel() * 4, [])
    for each in slices:
        steps = tuple(slice(*part.indices(size)) for part, size in zip(each, whole.shape, strict=True))
        if any(part.step < 0 for part in steps):
            continue  # torch has no such views
        marks[steps] = True
        view = View.of(whole[steps].permute(order))
        share.add(Share(share.size, view.pieces(View.of(whole))))
    found = None if share.pieces is None else covered(share.size, share.pieces)
    assert found in (None, 4 * int(marks.sum()))


def test_a_tensor_taken_row_by_row_is_one_piece():
    whole = torch.zeros(500, 8)
    share = Share(whole.numel() * 4, [])
    for row in whole:
        share.add(Share(share.size, View.of(row).pieces(View.of(whole))))
    assert share.pieces == [(16000, 0, 1, 0, 16000)]


def test_experts_columns_are_one_piece_and_scattered_rows_are_not_followed():
    whole = torch.zeros(400, 6, 8)
    assert View.of(whole[:, :, 2:6]).pieces(View.of(whole)) == [(32, 0, 2400, 8, 24)]
    assert View.of(whole[:, 1:3, 2:6]).pieces(View.of(whole)) is None
    share = Share(whole.numel() * 4, [])
    for row in range(0, 2 * PIECES + 2, 2):
        share.add(Share(share.size, View.of(whole[row]).pieces(View.of(whole))))
    assert share.pieces is None
