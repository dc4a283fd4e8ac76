"""Text in which control tokens are told from words that look like them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BEGIN, _END, _ESCAPE = "\ue000", "\ue001", "\ue002"
CONTROL = _BEGIN
"""What every control token of marked text starts with."""
_ESCAPED = {ord(sign): f"{_ESCAPE}{chr(ord(sign) + 16)}" for sign in (_BEGIN, _END, _ESCAPE)}
_CONTROL = re.compile(f"{_BEGIN}([^{_END}]*){_END}")
_HIDDEN = re.compile(f"{_ESCAPE}(.)", re.DOTALL)


def marked(text: str, *, is_control: bool = False) -> str:
    """A piece of text, or a control token, between signs that no piece of text has."""
    return f"{_BEGIN}{text}{_END}" if is_control else text.translate(_ESCAPED)


def marked_frame(text: str, controls: Iterable[str]) -> str:
    """A text in which control tokens count wherever they stand."""
    longest_first = sorted((control for control in controls if control), key=len, reverse=True)
    if not longest_first:
        return marked(text)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return "".join(marked(part, is_control=place % 2 == 1) for place, part in enumerate(parts))


def bare(text: str, hidden: Iterable[str] = ()) -> str:
    """Marked text as it is read, without some control tokens."""
    left_out = frozenset(hidden)
    text = _CONTROL.sub(lambda found: "" if found[1] in left_out else found[1], text)
    return _HIDDEN.sub(lambda found: chr(ord(found[1]) - 16), text)


def first_control(text: str) -> str:
    """The first control token of marked text, with its signs; empty if it has none."""
    found = _CONTROL.search(text)
    return "" if found is None else found[0]


def has_control(text: str) -> bool:
    """Whether a control token stands in marked text."""
    return _BEGIN in text


def find_mark(text: str, mark: str) -> int:
    """Where a mark first stands in marked text, and not within a control token; -1: nowhere."""
    if not mark or mark.startswith(_BEGIN):
        return text.find(mark) if mark else -1
    for found in re.finditer(f"{_BEGIN}[^{_END}]*{_END}|({re.escape(mark)})", text):
        if found[1] is not None:
            return found.start()
    return -1


def held_back(text: str, mark: str) -> int:
    """How many characters at a text's end may be the start of a mark."""
    for have in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:have]):
            return have
    return 0
