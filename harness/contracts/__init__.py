"""What each engine release does with a drafter's names and config: derived by running it, shipped as reviewed data."""
