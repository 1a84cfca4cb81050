"""Two records of one pair, the engine's version apart: what became worse, what is merely different, what is missing."""
