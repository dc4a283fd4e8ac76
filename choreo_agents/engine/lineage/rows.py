"""What is written of a message, as plain values with a version.

row     from what it is computed: the same for whoever says it, wherever
note    what one thread says of it: who has said it, of whose words it was made
answer  that it answers a call of a thread: the last that did
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from choreo_agents.errors import ChoreoError

FORMAT = 1
"""Of rows, notes and answers; what was written in another is not read."""
Sampled = tuple[int, float | None, tuple[tuple[int, float], ...]]
"""A token, its log-probability in nats, and the likeliest tokens with theirs."""
T = TypeVar("T")


class DamagedRowError(ChoreoError, ValueError):
    """What a store gave back is no row, note or answer of this format."""


@dataclass(frozen=True)
class LineageRow:
    """All that a message's KV is computed from."""

    id: str
    model: str
    """What makes its KV, as its handle says."""
    tokens: tuple[int, ...]
    parents: tuple[tuple[str, int], ...]
    """Ids, and offsets relative to the message's first token."""
    at: int
    """The position of its first token where it was encoded."""

    def plain(self) -> dict[str, Any]:
        """As `read` takes it."""
        told: dict[str, Any] = {"v": FORMAT, "id": self.id, "model": self.model, "tokens": [*self.tokens]}
        return told | {"parents": [[*parent] for parent in self.parents], "at": self.at}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> LineageRow:
        """A row that `plain` wrote.

        Raises:
            DamagedRowError: It did not.
        """
        return _read(plain, _row)


@dataclass(frozen=True)
class Note:
    """What a thread says of a message."""

    id: str
    author: str | None = None
    role: str | None = None
    label: str = ""
    origin: str = ""
    header: int = 0
    sampled: int | tuple[Sampled, ...] | None = None
    """Tokens as they were chosen, with their log-probabilities; or, without such, how many of those behind its header.
    None: it was not decoded."""
    finish: str | None = None
    usage: tuple[float | None, ...] = ()
    """What the call cost that made it."""
    authors: tuple[str, ...] = ()
    marked: bool = False
    is_thought: bool = False
    sources: tuple[str, ...] = ()
    """Ids of the messages whose words it encodes again, as far as the thread holds them."""
    foreign: tuple[tuple[str, str, int], ...] = ()
    """Id, model and length of those that other models have said."""
    thoughts: tuple[tuple[str, str | None], ...] = ()
    """What was thought before it was said, and by which call."""

    def plain(self) -> dict[str, Any]:
        """As `read` takes it: without what is as usual."""
        told = {name: _plain(value) for name, value in vars(self).items() if value != _USUAL.get(name)}
        return {"v": FORMAT, **told}

    def merged(self, other: Note) -> Note:
        """With what another process has said of the message in the same thread."""
        return replace(
            self,
            authors=_both(self.authors, other.authors),
            marked=self.marked or other.marked,
            is_thought=self.is_thought or other.is_thought,
            sources=_both(self.sources, other.sources),
            foreign=_both(self.foreign, other.foreign),
            thoughts=_both(self.thoughts, other.thoughts),
        )

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Note:
        """A note that `plain` wrote.

        Raises:
            DamagedRowError: It did not.
        """
        return _read(plain, _note)


@dataclass(frozen=True)
class Answered:
    """A call of a thread, and what it was answered. Which is replaced when the call is answered anew."""

    memo: str
    """Names the call, with a digest of what was asked."""
    id: str
    """The message's."""

    def plain(self) -> dict[str, Any]:
        """As `read` takes it."""
        return {"v": FORMAT, "memo": self.memo, "id": self.id}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Answered:
        """An answer that `plain` wrote.

        Raises:
            DamagedRowError: It did not.
        """
        return _read(plain, lambda told: cls(str(told["memo"]), str(told["id"])))


_USUAL = {name: field.default for name, field in Note.__dataclass_fields__.items()}


def _both(some: tuple[T, ...], others: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys([*some, *others]))


def _read(plain: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
    if plain.get("v") != FORMAT:
        raise DamagedRowError(f"it is written in format {plain.get('v')!r}, not {FORMAT}: another release wrote it")
    try:
        return read(plain)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedRowError(f"it is damaged: {error!r}") from error


def _row(plain: Mapping[str, Any]) -> LineageRow:
    tokens, parents = tuple(map(int, plain["tokens"])), tuple((str(each), int(at)) for each, at in plain["parents"])
    if not tokens:
        raise ValueError("it has no tokens")
    return LineageRow(str(plain["id"]), str(plain["model"]), tokens, parents, int(plain["at"]))


def _note(plain: Mapping[str, Any]) -> Note:
    told = {name: plain[name] for name in _USUAL if name in plain}
    for name, read in _READ.items():
        if isinstance(told.get(name), list):
            told[name] = tuple(map(read, told[name]))
    return Note(**told)


def _sampled(each: Sequence[Any]) -> Sampled:
    token, logprob, top = each
    return int(token), logprob, tuple((int(other), float(its)) for other, its in top)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


_READ: dict[str, Callable[[Any], Any]] = {
    "sampled": _sampled,
    "usage": lambda each: each,
    "authors": str,
    "sources": str,
    "foreign": lambda each: (str(each[0]), str(each[1]), int(each[2])),
    "thoughts": lambda each: (str(each[0]), each[1]),
}
"""How the parts of each list are read."""
