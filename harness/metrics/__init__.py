"""What an engine's own acceptance figures mean, held against a canary whose every verify step is known."""
