"""The code that runs inside the engine's own processes, and the reader of the evidence it leaves."""
