"""Questions with one answer: reads what a reply answers, and compares it with what is right."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from pydantic import Field

from choreo_agents.workflows.case import Item

FIRST, LAST = "first sentence", "last sentence"
_NOT_WITHIN = r"(?<![\w.])(?<!\d,(?=\d))(?<!(?<!\w)[-\u2212](?=\d))"
"""Where an answer may start: not within a word or number, nor behind the sign of one."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"(?<![\w.^])(?:(?<![)\w])[-\u2212])?(?:\d+\.\d+|\.\d+|\d+)(?:[/^]\d+)*(?!\w)")
_MARKS = " .,:;!?\"'`*$"


def read_answer(reply: str, where: str) -> str:
    """The answer that a reply states.

    Args:
        reply: All that was said.
        where: `first sentence`, `last sentence`, or what stands before the answer on its line: `Answer:`. Without
            that the last line that says anything counts.
    """
    if where in (FIRST, LAST):
        sentences = re.findall(r"[^.]*\.|[^.]+", reply.strip()) or [""]
        return str(sentences[0 if where == FIRST else -1]).strip()
    marked = re.findall(rf"{re.escape(where)}[ \t]*(\S.*)", reply, re.IGNORECASE)
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    return str(marked[-1]).strip() if marked else lines[-1] if lines else ""


def states(answer: str, right: str, *, anywhere: bool = False) -> bool:
    """Whether an answer is the right one.

    A number is right if it is the last one that the answer names, or, with `anywhere`, any of them; however it is
    written: 1,500 is 1500, 0.5 is 1/2.
    A single capital is right where it stands alone. Anything else has to be said in whole words, whatever their case.
    """
    number = _number(right)
    if number is not None:
        numbers = _NUMBER.findall(_THOUSANDS.sub("", answer))
        return any(_number(named) == number for named in (numbers if anywhere else numbers[-1:]))
    if len(right.strip()) == 1 and right.strip().isupper():
        return re.search(rf"(?<!\w){re.escape(right.strip())}(?!\w)", answer) is not None
    said, wanted = _plain(answer), _plain(right)
    return bool(wanted) and re.search(rf"{_NOT_WITHIN}{re.escape(wanted)}(?!\w|[.,]\d)", said) is not None


def majority(answers: Sequence[str]) -> str:
    """The answer that most gave; the first of equals. Who gave none does not count, and none of none is none."""
    counts = Counter(plain for answer in answers if (plain := _plain(answer)))
    return next((answer for answer in answers if counts[_plain(answer)] == max(counts.values(), default=-1)), "")


def _number(text: str) -> Fraction | None:
    """What a text that is nothing but a number means."""
    words = _THOUSANDS.sub("", text.strip(" $*`").rstrip(".")).replace("\u2212", "-")
    try:
        return Fraction(words)
    except (ValueError, ZeroDivisionError):
        return None


def _plain(text: str) -> str:
    words = " ".join(text.casefold().split()).rstrip(_MARKS)
    return re.sub(rf"^((?!\.\d)[{_MARKS}])+", "", words)  # the point of .5 is no mark


class Question(Item):
    """A question, and what is right if that is known."""

    question: str = Field(min_length=1)
    answer: str | None = None
    """The reply's answer has to say it in whole words."""

    @property
    def graded(self) -> bool:
        return self.answer is not None

    def score(self, answer: str) -> float | None:
        """1 if an answer is right, 0 if it is wrong, None if nobody knows."""
        return None if self.answer is None else float(states(answer, self.answer))
