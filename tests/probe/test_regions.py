"""The interval map agrees with a plain array of marks, whatever is written where."""

from __future__ import annotations

import torch
from draftgate_probe.regions import Regions, View
from hypothesis import given
from hypothesis import strategies as st

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
