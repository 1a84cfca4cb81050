"""What is under test: a target, a drafter, how to launch them, and what to expect of them."""

from harness.pairs.load import SHIPPED_FILE, adhoc, find, read_file
from harness.pairs.model import EngineLaunch, Expectations, Pair, Workload

__all__ = ["SHIPPED_FILE", "EngineLaunch", "Expectations", "Pair", "Workload", "adhoc", "find", "read_file"]
