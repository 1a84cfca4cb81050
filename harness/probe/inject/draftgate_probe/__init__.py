"""Runs inside every process of an engine, attached through its plugin entry points; writes evidence and detaches.

Only the standard library, torch and the engine itself may be imported here: this package lives in the engine's
environment, not in the harness's.
"""
