"""Answers: the replies in a graph's state, the answer that each states, and whether that is the right one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

FIRST, LAST = "first sentence", "last sentence"
_NOT_WITHIN = r"(?<![\w.])(?<!\d,(?=\d))(?<!(?<!\w)[-\u2212](?=\d))"
"""Pattern of places where an answer may start: not within a word or a number, nor after a number's sign."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"(?<![\w.^])(?:(?<![)\w])[-\u2212])?(?:\d+\.\d+|\.\d+|\d+)(?:[/^]\d+)*(?!\w)")
_MARKS = " .,:;!?\"'`*$"


def read_answer(reply: str, where: str) -> str:
    """Extract the answer that a reply states.

    Args:
        reply: The whole reply.
        where: `first sentence`, `last sentence`, or the text before the answer on its line, as in `Answer:`. If no line
            has that text, the last non-empty line is the answer.
    """
    if where in (FIRST, LAST):
        sentences = re.findall(r"[^.]*\.|[^.]+", reply.strip()) or [""]
        return str(sentences[0 if where == FIRST else -1]).strip()
    marked = re.findall(rf"{re.escape(where)}[ \t]*(\S.*)", reply, re.IGNORECASE)
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    return str(marked[-1]).strip() if marked else lines[-1] if lines else ""


def states(answer: str, right: str, *, anywhere: bool = False) -> bool:
    """Return whether an answer states the right one.

    A number must be the last one in the answer, or with `anywhere` any of them; 1,500 equals 1500, and 0.5 equals 1/2.
    A single capital must stand alone. Any other text must occur in whole words, whatever their case.
    """
    number = _parse_number(right)
    if number is not None:
        numbers = _NUMBER.findall(_THOUSANDS.sub("", answer))
        return any(_parse_number(named) == number for named in (numbers if anywhere else numbers[-1:]))
    if len(right.strip()) == 1 and right.strip().isupper():
        return re.search(rf"(?<!\w){re.escape(right.strip())}(?!\w)", answer) is not None
    text, target = _normalize(answer), _normalize(right)
    return bool(target) and re.search(rf"{_NOT_WITHIN}{re.escape(target)}(?!\w|[.,]\d)", text) is not None


def majority(answers: Sequence[str]) -> str:
    """Return the most frequent answer, the first one on ties. Empty answers do not count; "" if there are no others."""
    counts = Counter(plain for answer in answers if (plain := _normalize(answer)))
    return next((answer for answer in answers if counts[_normalize(answer)] == max(counts.values(), default=-1)), "")


def _parse_number(text: str) -> Fraction | None:
    """Parse a text that is a number; None if it is not."""
    words = _THOUSANDS.sub("", text.strip(" $*`").rstrip(".")).replace("\u2212", "-")
    try:
        return Fraction(words)
    except (ValueError, ZeroDivisionError):
        return None


def _normalize(text: str) -> str:
    words = " ".join(text.casefold().split()).rstrip(_MARKS)
    return re.sub(rf"^((?!\.\d)[{_MARKS}])+", "", words)  # the point of .5 is no punctuation


def turns_of(state: Mapping[str, Any], since: int = 0) -> list[tuple[str, str]]:
    """Return node and text of each message of a state, in order; nodes without the names of subgraphs.

    Args:
        state: State of a graph.
        since: Number of entries of the `handles` channel that are left out.
    """
    words = {message.id: str(message.text) for message in state["messages"]}
    entries = state["handles"][since:]
    return [(entry["author"].rpartition("|")[2], words.get(entry["message_id"], "")) for entry in entries]


def answers_of(state: Mapping[str, Any], *nodes: str) -> list[str]:
    """Return the texts of all messages of some nodes, in order."""
    return [words for node, words in turns_of(state) if node in nodes]
