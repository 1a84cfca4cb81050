"""The shared environment's triton, as far as a release is prepared with it."""
