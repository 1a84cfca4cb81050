"""What `--stats` counts, in every dtype, over blocks that end anywhere, within a bound of memory."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.checkpoint import statistics
from harness.checkpoint.data import NUMPY, whole
from harness.checkpoint.header import BITS, read_header
from tests.checkpoint.files import blob, entry


@pytest.fixture
def measure(tmp_path):
    """Return a function that writes one tensor and measures it."""

    def write(values):
        save_file({"x": values}, tmp_path / "model.safetensors")
        return statistics.measure(read_header(tmp_path / "model.safetensors"), "x")

    return write


FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", [1, 7, 16, 1 << 20])
def test_counts(measure, monkeypatch, dtype, block):
    monkeypatch.setattr(statistics, "BLOCK", block * np.dtype(dtype).itemsize)
    values = np.arange(1, 51).reshape(5, 10).astype(dtype)
    values[1] = 2
    values[3, 9] = np.nan
    values[4, :3] = np.inf  # of which float8_e4m3fn makes NaN
    finite_only = dtype == ml_dtypes.float8_e4m3fn
    found = measure(values)
    assert (found.nan, found.inf) == ((4, 0) if finite_only else (1, 3))
    assert (found.all_zero, found.rows, found.constant_rows) == (False, 5, 1)


@pytest.mark.parametrize("dtype", [*FLOATS, np.int8, np.int64, np.uint16, bool])
def test_zeros(measure, dtype):
    zeros = np.zeros((3, 4), dtype)
    assert measure(zeros).all_zero
    assert measure(zeros).constant_rows == 3
    zeros[2, 3] = 1
    assert not measure(zeros).all_zero
    assert measure(zeros).constant_rows == 2


def test_minus_zero_is_zero(measure):
    assert measure(np.array([[-0.0, 0.0]], np.float32)).all_zero
    assert not measure(np.array([[-1, 0]], np.int8)).all_zero
    assert not measure(np.array([[-128, 0]], np.int8)).all_zero


@pytest.mark.parametrize("shape", [(), (4,), (0, 4), (4, 0)])
def test_no_rows(measure, shape):
    found = measure(np.zeros(shape, np.float32))
    assert (found.constant_rows, found.all_zero) == (0, 0 not in shape)


def test_rows_run_along_the_last_axis(measure):
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    values[1, 2] = 5
    assert (measure(values).rows, measure(values).constant_rows) == (6, 1)


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_every_dtype_can_be_measured(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    size = BITS[dtype] * 16 // 8
    path.write_bytes(blob({"x": entry(dtype, (2, 8), (0, size))}, bytes(size)))
    found = statistics.measure(read_header(path), "x")
    assert (found.nan, found.inf) == (0, 0)
    assert found.all_zero == (dtype != "F8_E8M0")
    assert (dtype in NUMPY) == (BITS[dtype] >= 8)
    if dtype in NUMPY:
        assert whole(read_header(path), "x").shape == (2, 8)


def test_memory_is_bounded(tmp_path):
    path = tmp_path / "model.safetensors"
    columns, rows = 1 << 14, 1 << 12
    size = rows * columns * 2
    path.write_bytes(blob({"x": entry("BF16", (rows, columns), (0, size))}))
    with path.open("r+b") as handle:
        handle.seek(0, 2)
        handle.truncate(handle.tell() + size)
    shard = read_header(path)
    tracemalloc.start()
    found = statistics.measure(shard, "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.all_zero
    assert found.constant_rows == rows
    assert peak < 6 * statistics.BLOCK < size


def judged(dtype, **counts):
    found = statistics.Statistics(**{"nan": 0, "inf": 0, "all_zero": False, "rows": 4, "constant_rows": 0, **counts})
    return [(finding.code, str(finding.severity)) for finding in statistics.judge("x", dtype, found)]


def test_findings():
    assert judged("BF16") == []
    assert judged("BF16", nan=1) == [("INS301", "error")]
    assert judged("BF16", inf=1) == [("INS302", "error")]
    assert judged("BF16", all_zero=True, constant_rows=4) == [("INS303", "error")]
    assert judged("BF16", all_zero=True, rows=0) == [("INS303", "warning")]
    assert judged("BF16", constant_rows=4) == [("INS304", "warning")]
    assert judged("BF16", constant_rows=1) == [("INS304", "note")]
    assert judged("I64", all_zero=True, constant_rows=4) == []
