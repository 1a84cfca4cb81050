"""One run record, and the ways it is shown."""
