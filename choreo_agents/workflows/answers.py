"""Reads what a reply answers, and compares it with what is right."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from choreo_agents.language.scoring import first_sentence, last_sentence

FIRST, LAST = "first sentence", "last sentence"
_NOT_WITHIN = r"(?<![\w.])(?<!\d,(?=\d))(?<!(?<!\w)[-\u2212](?=\d))"
"""Where an answer may start: not within a word or number, nor behind the sign of one."""
_MARKS = " .,:;!?\"'`*$"


def read_answer(reply: str, where: str) -> str:
    """The answer that a reply states.

    Args:
        reply: All that was said.
        where: `first sentence`, `last sentence`, or what stands before the answer on its line: `Answer:`. Without
            that the last line that says anything counts.
    """
    if where == FIRST:
        return first_sentence(reply)
    if where == LAST:
        return last_sentence(reply)
    marked = re.findall(rf"{re.escape(where)}[ \t]*(\S.*)", reply, re.IGNORECASE)
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    return str(marked[-1]).strip() if marked else lines[-1] if lines else ""


def states(answer: str, right: str) -> bool:
    """Whether an answer is the right one, or says it in whole words; case, spaces and marks at its ends aside."""
    said, wanted = _plain(answer), _plain(right)
    return bool(wanted) and re.search(rf"{_NOT_WITHIN}{re.escape(wanted)}(?!\w|[.,]\d)", said) is not None


def majority(answers: Sequence[str]) -> str:
    """The answer that most gave; the first of equals. Who gave none does not count, and none of none is none."""
    counts = Counter(plain for answer in answers if (plain := _plain(answer)))
    return next((answer for answer in answers if counts[_plain(answer)] == max(counts.values(), default=-1)), "")


def _plain(text: str) -> str:
    words = " ".join(text.casefold().split()).rstrip(_MARKS)
    return re.sub(rf"^((?!\.\d)[{_MARKS}])+", "", words)  # the point of .5 is no mark
