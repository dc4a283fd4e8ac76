"""The result of an audit as typed plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PrivateAttr,
    TypeAdapter,
    WrapValidator,
    computed_field,
)

from choreo_agents.graph.visibility import START_SOURCE, Channel
from choreo_agents.tracing import table_html

SENT = "sent"
"""Prefix in a hop: a `Send` hands on the message in this mode although the rule shares KV."""
ACROSS = "across models"
"""Suffix in a hop: the reader runs on another model than the source, whose text is encoded again for it."""
ROWS = 200
"""Most findings and blocked pairs that are displayed: a large graph has as many as it has pairs of nodes."""
_SHOWN = 3
"""Items in the representation of a listing."""
ContextKind = Literal["system", "message", "module", "thoughts"]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True)


class Hop(_Plain):
    """A step of a path: the source, the reader, and the rule by which it reads."""

    source: str
    reader: str
    by: str
    """The edge's rule; `own` between nodes of one persona; `scope` where a fresh encoding names the context; `...
    across models` where the reader runs on another model and gets text alone; `state` where a function reads the text
    in the graph's state; `sent` where a `Send` may hand on text though the rule shares KV."""


class PrivateContext(_Plain):
    """A text that should influence only some of the agents."""

    name: str
    kind: ContextKind
    owners: tuple[str, ...]
    """The nodes that have it in their own views, or wrote it."""


_PARTS = TypeAdapter(tuple[tuple[Hop, ...], tuple[tuple[str, str], ...]])


class Finding(_Plain):
    """A private context that can reach, or has reached, a reader."""

    context: str
    reader: str
    """A persona, or one node."""
    channel: Channel
    violation: str = ""
    """The promise it breaks; empty if none."""
    _parts: tuple[Any, Any] = PrivateAttr()
    """Its path and its cut, or the functions that compute them on first access."""

    def __init__(self, *, path: Any = (), cut: Any = (), **fields: Any) -> None:
        super().__init__(**fields)
        self._parts = (path, cut) if callable(path) else _PARTS.validate_python((path, cut))

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def path(self) -> tuple[Hop, ...]:
        """The shortest path, starting at the context."""
        path: tuple[Hop, ...] = self._parts[0]() if callable(self._parts[0]) else self._parts[0]
        return path

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def cut(self) -> tuple[tuple[str, str], ...]:
        """Edges (source, reader) that cut all paths: `reencoded` for the encoding channel, undeclared for text. Empty
        if no edges would."""
        edges: tuple[tuple[str, str], ...] = self._parts[1]() if callable(self._parts[1]) else self._parts[1]
        return edges

    def __reduce__(self) -> tuple[Any, ...]:
        return Finding.model_validate, (self.model_dump(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Finding) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash((self.context, self.reader, self.channel, self.violation))

    def walk(self) -> str:
        """Return the path as text: `alice.system -> alice =shared=> bob`."""
        steps = [f" -> {hop.reader}" if hop.by == "own" else f" ={hop.by}=> {hop.reader}" for hop in self.path]
        return "".join([self.path[0].source if self.path else self.context, *steps])


class Blocked(_Plain):
    """Two messages of one view, the later of which was encoded without attending to the earlier, unlike in ordinary
    prompting."""

    reader: str
    earlier: str
    later: str


Each = TypeVar("Each")


class Row(NamedTuple):
    """Findings of one context through one channel, as a row of a table."""

    context: str
    readers: str
    channel: Channel
    walks: str
    """The paths, one per line, without those that are the beginning of another."""
    cuts: str
    """The edges that would cut the paths, by reader."""
    is_broken: bool


def _input(source: str) -> str:
    return "input" if source == START_SOURCE else source


class Listing(Sequence[Each]):
    """A sequence whose items are computed on each iteration: there may be as many as pairs of nodes.

    Args:
        items: The items, or a function that yields the same ones each time.
    """

    def __init__(self, items: tuple[Each, ...] | Callable[[], Iterator[Each]]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Each]:
        return iter(self._items if isinstance(self._items, tuple) else self._items())

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)}, and none at {index}")
        return next(islice(self, number, None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[Each]) -> tuple[Each, ...]:
        return (*self, *other)

    def __reduce__(self) -> tuple[Any, ...]:
        return Findings if isinstance(self, Findings) else Listing, (tuple(self),)

    @classmethod
    def of(cls, value: Any, check: Callable[[Any], Any]) -> Self:
        """Return the value itself if it is a listing, else a listing of its validated items."""
        return value if isinstance(value, cls) else cls(tuple(check(value)))

    def __repr__(self) -> str:
        items = [*map(repr, islice(self, _SHOWN))]
        return f"({', '.join(items)}{', ...' if len(self) > _SHOWN else ''})"


class Findings(Listing[Finding]):
    """The findings of an audit."""

    def violations(self) -> Iterator[Finding]:
        """Yield the findings that break a promise."""
        return (finding for finding in self if finding.violation)

    def reached(self, reader: str, channel: Channel) -> set[str]:
        """Return the contexts that reach a reader through a channel."""
        return {finding.context for finding in self if (finding.reader, finding.channel) == (reader, channel)}


class AuditReport(_Plain):
    """The private contexts that can influence each agent, or, for a finished run, did.

    There may be as many findings as pairs of nodes: findings, their paths and their cuts are computed on access.
    """

    contexts: tuple[PrivateContext, ...]
    """Texts that not every agent may read."""
    findings: Annotated[Sequence[Finding], WrapValidator(Findings.of), PlainSerializer(tuple, tuple[Finding, ...])]
    """Contexts that reach a reader, broken promises first."""
    blocked: Annotated[Sequence[Blocked], WrapValidator(Listing.of), PlainSerializer(tuple, tuple[Blocked, ...])] = ()
    """Pairs of messages of one view, of which the later was encoded without the earlier."""
    outside: tuple[str, ...] = ()
    """What the audit cannot prove anything about."""
    changed: tuple[Hop, ...] = ()
    """Edges that the policy has switched to `reencoded`."""

    @property
    def violations(self) -> tuple[Finding, ...]:
        """The findings that break a promise."""
        return tuple(cast(Findings, self.findings).violations())

    @property
    def listed(self) -> Sequence[Finding]:
        """The findings, violations first. Text that reaches a reader of the encoding is left out: it adds nothing,
        unless it breaks a promise."""
        return Listing(self._iter_listed)

    def _iter_listed(self) -> Iterator[Finding]:
        yield from self.violations
        yield from (finding for finding in self.findings if finding.channel == "encoding" and not finding.violation)
        attended: dict[str, set[str]] = {}
        for finding in self.findings:
            if finding.channel == "words" and not finding.violation:
                if finding.reader not in attended:
                    attended[finding.reader] = self.reached(finding.reader, "encoding")
                if finding.context not in attended[finding.reader]:
                    yield finding

    def rows(self, most: int | None = None) -> Iterator[Row]:
        """Yield a table row for each context, channel and kind of finding, of the first `most` listed findings."""
        folded: dict[tuple[object, ...], list[Finding]] = {}
        for f in islice(self.listed, most):
            folded.setdefault((f.context, f.channel, bool(f.violation), bool(f.cut)), []).append(f)
        for findings in folded.values():
            first = findings[0]
            walks = dict.fromkeys(finding.walk() for finding in findings)
            paths = [walk for walk in walks if not any(longer.startswith(f"{walk} ") for longer in walks)]
            edges: dict[str, dict[str, None]] = {}
            for source, reader in (edge for finding in findings for edge in finding.cut):
                edges.setdefault(reader, {})[source] = None
            cuts = [f"{', '.join(sources)} -> {reader}" for reader, sources in edges.items()]
            readers = ", ".join(dict.fromkeys(finding.reader for finding in findings))
            yield Row(first.context, readers, first.channel, "\n".join(paths), "\n".join(cuts), bool(first.violation))

    def blocked_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield table rows (reader, messages, what these were encoded without)."""
        later: dict[tuple[str, str], list[str]] = {}
        for pair in self.blocked:
            later.setdefault((pair.reader, _input(pair.earlier)), []).append(_input(pair.later))
        earlier: dict[tuple[str, str], list[str]] = {}
        for (reader, unseen), messages in later.items():
            earlier.setdefault((reader, ", ".join(messages)), []).append(unseen)
        for (reader, joined), names in earlier.items():
            yield reader, joined, ", ".join(names)

    def reached(self, reader: str, channel: Channel) -> set[str]:
        """Return the contexts that reach a reader through a channel."""
        return cast(Findings, self.findings).reached(reader, channel)

    def _repr_html_(self) -> str:
        rows = ((*row[:4], row.cuts or None, "✗" if row.is_broken else None) for row in self.rows(ROWS))
        columns = ("private context", "can reach", "through", "path", "cut by", "breaks a promise")
        table = table_html(f"who can be influenced by what: {len(self.violations)} promises are broken", columns, rows)
        blocked = islice(self.blocked_rows(), ROWS)
        return table + table_html("encoded without", ("in the view of", "messages", "have not seen"), blocked)
