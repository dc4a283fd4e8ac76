"""Marks control tokens in a text with private-use characters, so that text that looks like one is not confused."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BEGIN, _END, _ESCAPE = "\ue000", "\ue001", "\ue002"
CONTROL = _BEGIN
"""First character of every control token in marked text."""
_ESCAPED = {ord(sign): f"{_ESCAPE}{chr(ord(sign) + 16)}" for sign in (_BEGIN, _END, _ESCAPE)}
_CONTROL = re.compile(f"{_BEGIN}([^{_END}]*){_END}")
_HIDDEN = re.compile(f"{_ESCAPE}(.)", re.DOTALL)


def mark_text(text: str, *, is_control: bool = False) -> str:
    """Mark a piece: delimit a control token; escape the delimiters in plain text."""
    return f"{_BEGIN}{text}{_END}" if is_control else text.translate(_ESCAPED)


def mark_special(text: str, controls: Iterable[str]) -> str:
    """Mark a text in which control tokens count anywhere."""
    longest_first = sorted((control for control in controls if control), key=len, reverse=True)
    if not longest_first:
        return mark_text(text)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return "".join(mark_text(part, is_control=place % 2 == 1) for place, part in enumerate(parts))


def bare(text: str, hidden: Iterable[str] = ()) -> str:
    """Unmark a text, leaving out some control tokens."""
    left_out = frozenset(hidden)
    text = _CONTROL.sub(lambda match: "" if match[1] in left_out else match[1], text)
    return _HIDDEN.sub(lambda match: chr(ord(match[1]) - 16), text)


def first_control(text: str) -> str:
    """Return the first control token of marked text with its delimiters; "" if there is none."""
    match = _CONTROL.search(text)
    return "" if match is None else match[0]


def find_mark(text: str, mark: str) -> int:
    """Return the first index of a mark in marked text, outside of control tokens; -1 if there is none."""
    if not mark or mark.startswith(_BEGIN):
        return text.find(mark) if mark else -1
    for match in re.finditer(f"{_BEGIN}[^{_END}]*{_END}|({re.escape(mark)})", text):
        if match[1] is not None:
            return match.start()
    return -1


def partial_mark(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may start a mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
