"""draftgate: prove that a speculative drafter is loaded, fed, accepted and worth it."""

__version__ = "0.1.0"
