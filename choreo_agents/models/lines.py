"""Shortens error messages of other libraries to one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first non-empty line, with the next if it ends in a colon; without any, the error's class name."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{first} {more[0]}" if first.endswith(":") and more else first
