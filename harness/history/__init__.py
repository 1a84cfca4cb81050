"""Runs over time: the history file, trends and the steps in them, and records of several runs joined into one."""
