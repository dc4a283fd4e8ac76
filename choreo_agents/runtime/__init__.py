"""Requests, the scheduler that decides, the step that says it in plain data, the executor that does it."""
