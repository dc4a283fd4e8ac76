"""Scorers of answers: each scores the text of one message, or how several agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from choreo_bench.language.problem import Said, Scorer


def sentences(text: str) -> list[str]:
    """The sentences of a text, each with its full stop; a rest without one is a sentence too."""
    parts = [part.strip() for part in text.split(".")]
    whole = [f"{part}." for part in parts[:-1]]
    return whole + ([parts[-1]] if parts[-1] else [])


def first_sentence(text: str) -> str:
    """The part of a reply that states the answer: up to and with the first full stop."""
    head, stop, _ = text.strip().partition(".")
    return head + stop


def last_sentence(text: str) -> str:
    """The last sentence of a text; empty for an empty text."""
    parts = sentences(text)
    return parts[-1] if parts else ""


@dataclass(frozen=True)
class FirstSentence:
    """Right if the message's first sentence is the gold answer."""

    message: str
    gold: str

    def __call__(self, answers: Said) -> float:
        return float(first_sentence(answers[self.message]) == self.gold)


@dataclass(frozen=True)
class LastSentence:
    """Right if the message's last sentence is the gold answer; what comes before it is its author's business."""

    message: str
    gold: str

    def __call__(self, answers: Said) -> float:
        return float(last_sentence(answers[self.message]) == self.gold)


@dataclass(frozen=True)
class OneOf:
    """Right if the message's last sentence is one of several right ones."""

    message: str
    gold: tuple[str, ...]

    def __call__(self, answers: Said) -> float:
        return float(last_sentence(answers[self.message]) in self.gold)


@dataclass(frozen=True)
class EachExact:
    """The share of messages that say exactly what they should."""

    gold: tuple[tuple[str, str], ...]
    """Message names and their words."""

    def __call__(self, answers: Said) -> float:
        return sum(answers[name].strip() == words for name, words in self.gold) / len(self.gold)


@dataclass(frozen=True)
class Mean:
    """The mean of several scores: solved if each of them is."""

    scorers: tuple[Scorer, ...]

    def __call__(self, answers: Said) -> float:
        return sum(scorer(answers) for scorer in self.scorers) / len(self.scorers)


@dataclass(frozen=True)
class AllSentences:
    """The share of the gold sentences that are said, in any order; something else besides costs the point."""

    message: str
    gold: tuple[str, ...]

    def __call__(self, answers: Said) -> float:
        heard = sentences(answers[self.message])
        matches = sum((Counter(heard) & Counter(self.gold)).values())
        return matches / max(len(self.gold), len(heard))


@dataclass(frozen=True)
class SameItems:
    """The share of items listed, in any order; anything else, or one twice, costs the point."""

    message: str
    items: frozenset[str]
    opening: str
    """What the list starts with: `We see`."""

    def __call__(self, answers: Said) -> float:
        heard = listed(answers[self.message], self.opening)
        if not heard:
            return 0.0
        return len(set(heard) & self.items) / max(len(self.items), len(heard))


@dataclass(frozen=True)
class Coverage:
    """The share of concepts that a merged text covers; sentences that no part said cost half of the point."""

    message: str
    parts: tuple[str, ...]
    concepts: frozenset[tuple[str, str]]
    """Who has what; covered by the sentence that says so, if a part said it."""

    def __call__(self, answers: Said) -> float:
        heard = sentences(answers[self.message])
        offered = {sentence for part in self.parts for sentence in sentences(answers[part])}
        wanted = {f"{person} has {thing}." for person, thing in self.concepts}
        covered = len(wanted & offered & set(heard)) / len(wanted)
        return covered if all(sentence in offered for sentence in heard) else covered / 2


def listed(text: str, opening: str) -> list[str]:
    """The items of `We see kites, boats and drums.`; none if the text is not such a sentence."""
    words = text.strip()
    if not (words.startswith(f"{opening} ") and words.endswith(".")) or words.count(".") > 1:
        return []
    return words[len(opening) + 1 : -1].replace(" and ", ", ").split(", ")


def as_list(items: Sequence[str]) -> str:
    """`kites`, `kites and boats`, `kites, boats and drums`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
