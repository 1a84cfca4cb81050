"""Whether two tensors are the same, whatever files and dtypes they are in."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.checkpoint.data import alike
from harness.checkpoint.header import read_header

VALUES = np.linspace(-3, 3, 96, dtype=np.float32).reshape(8, 12)


@pytest.fixture
def same(tmp_path):
    def same(one, two):
        for name, values in (("one", one), ("two", two)):
            save_file({name: values}, tmp_path / f"{name}.safetensors")
        shards = [read_header(tmp_path / f"{name}.safetensors") for name in ("one", "two")]
        return alike(shards[0], "one", shards[1], "two")

    return same


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8])
def test_the_same_values(same, dtype):
    assert same(VALUES.astype(dtype), VALUES.astype(dtype))


@pytest.mark.parametrize("place", [0, 50, 95])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_one_value_that_differs(same, place, dtype):
    other = VALUES.astype(dtype).copy()
    other.flat[place] += dtype(1)
    assert not same(VALUES.astype(dtype), other)


def test_values_that_a_coarser_dtype_rounded_are_the_same(same):
    assert same(VALUES, VALUES.astype(ml_dtypes.bfloat16))
    assert same(VALUES.astype(np.float16), VALUES)
    assert not same(VALUES + 1, VALUES.astype(ml_dtypes.bfloat16))


def test_another_shape(same):
    assert not same(VALUES, VALUES.reshape(12, 8))


def test_nan_is_itself(same):
    values = np.full((2, 2), np.nan, np.float32)
    assert same(values, values.copy())


def test_larger_than_a_block(same):
    large = np.zeros(5_000_000, np.int8)
    other = large.copy()
    other[-1] = 1
    assert same(large, large)
    assert not same(large, other)
    assert not same(other.astype(np.float32), large.astype(ml_dtypes.bfloat16))
