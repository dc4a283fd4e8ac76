"""What others' errors say, in one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line that says something, and the next where that only announces it; else the error's kind."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{first} {rest[0]}" if first.endswith(":") and rest else first
