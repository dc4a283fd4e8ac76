"""Rows and notes of messages, as plain values for a store.

row     from what it is computed: the same for whoever says it, wherever
note    what one thread says of it: who has said it, of whose words it was made
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from choreo_agents.errors import ChoreoError

Sampled = tuple[int, float | None, tuple[tuple[int, float], ...]]
"""A token, its log-probability in nats, and the likeliest tokens with theirs."""
T = TypeVar("T")


class DamagedRowError(ChoreoError, ValueError):
    """An entry of a store that the tenant did not write there, or not in this form."""


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

    def plain(self, others: Iterable[LineageRow] = ()) -> dict[str, Any]:
        """As `read` takes it. Of parents that stand where another row has them too, that row is named in their place:
        each message of a conversation reads what the one before has read.

        Args:
            others: Rows that whoever reads it will know.
        """
        own, shared, like = self._seen(), 0, ""
        for other in others:
            if (count := _alike(own, other._seen())) > shared:
                shared, like = count, other.id
        told: dict[str, Any] = {"id": self.id, "model": self.model, "tokens": [*self.tokens], "at": self.at}
        told["parents"] = [[*parent] for parent in own[shared:]]
        return told | ({"like": [like, shared]} if shared else {})

    @classmethod
    def read(cls, plain: Mapping[str, Any], known: Mapping[str, LineageRow]) -> LineageRow:
        """A row that `plain` wrote.

        Raises:
            DamagedRowError: It did not, or the row that it names is not known.
        """
        with _damage():
            like, shared = plain.get("like") or ["", 0]
            seen = [
                *(known[like]._seen()[:shared] if shared else ()),
                *((str(each), int(at)) for each, at in plain["parents"]),
            ]
            at, tokens = int(plain["at"]), tuple(map(int, plain["tokens"]))
            if not tokens:
                raise ValueError("it has no tokens")
            parents = tuple((each, stands - at) for each, stands in seen)
            return cls(str(plain["id"]), str(plain["model"]), tokens, parents, at)

    def _seen(self) -> list[tuple[str, int]]:
        """Its parents, and the positions at which it has read them."""
        return [(each, self.at + offset) for each, offset in self.parents]


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
        return {name: _plain(value) for name, value in vars(self).items() if value != _USUAL.get(name)}

    def merged(self, other: Note) -> Note:
        """With what was said later of the message in the same thread, by whichever process."""
        return replace(
            self,
            header=self.header or other.header,
            sampled=other.sampled if self.sampled is None else self.sampled,
            finish=self.finish or other.finish,
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
        with _damage():
            told = {name: plain[name] for name in _USUAL if name in plain}
            for name, read in _READ.items():
                if isinstance(told.get(name), list):
                    told[name] = tuple(map(read, told[name]))
            return cls(**told)


_USUAL = {name: field.default for name, field in Note.__dataclass_fields__.items()}


def _both(some: tuple[T, ...], others: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys([*some, *others]))


def _alike(one: Sequence[tuple[str, int]], other: Sequence[tuple[str, int]]) -> int:
    """How many of the first are the same."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedRowError(f"it is damaged: {error!r}") from error


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
