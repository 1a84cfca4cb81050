"""Whether each engine feeds the drafter the states that the target's own forward has, and the same as the other's."""
