"""Canary pairs: a target and a drafter whose acceptance is known by arithmetic, and the faults to inject."""

from harness.canary.build import Canary, build, load
from harness.canary.oracle import Acceptance, Oracle
from harness.canary.spec import SHIPPED, CanarySpec

__all__ = ["SHIPPED", "Acceptance", "Canary", "CanarySpec", "Oracle", "build", "load"]
