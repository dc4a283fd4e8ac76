"""What one step attends to, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class QuerySpan:
    """`count` consecutive tokens of a step that read a run of slots shifted by `shift` positions."""

    first: int
    count: int
    shift: int
    place: int = field(default=0, compare=False)
    """Which part of the tokens' view it is: what is found in parts is added up in their order, whoever else reads them
    and wherever they lie."""


@dataclass(frozen=True)
class Read:
    """A run of slots and all that read it in this step: they read it together, once.

    `position` is where the first slot's token was encoded, the next ones follow; a span sees them `shift` further.
    `causal` marks the tokens' own run: one span without shift, as many slots as tokens, each seeing up to itself.
    `window` hides, for each token by itself, what lies so many positions or more before it; every token of the spans
    is left at least one slot.
    """

    start: int
    length: int
    position: int
    spans: tuple[QuerySpan, ...]
    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        assert self.length > 0, "an empty run crashes the attention kernel: leave it out"
        assert all(span.count > 0 for span in self.spans)
        if self.causal:
            assert len(self.spans) == 1 and self.spans[0].count == self.length and self.spans[0].shift == 0

    @property
    def queries(self) -> int:
        return sum(span.count for span in self.spans)


@dataclass(frozen=True)
class Layout:
    """One step's attention.

        token       0    1    2    3          positions, write_slots: one entry a token
        reads       [slots 0-31: tokens 0, 1-2 (shifted by 7)]  [slots 64-66: token 3]  ...

    Every token's view is the union of the reads whose spans hold it; each token reads at least its own slot. The
    tokens of a span stand at consecutive positions.
    """

    positions: tuple[int, ...]
    write_slots: tuple[int, ...]
    reads: tuple[Read, ...]
    own: tuple[int, ...] = field(default=(), compare=False)
    """Where each token is of a row that decodes, and nobody else reads the run that ends in its slot: which read that
    is. Else empty."""

    def grown(self, steps: int) -> Layout:
        """The layout so many decode steps later: each row one token further with each, in the slots behind its own."""
        if not steps:
            return self
        assert self.own
        reads = list(self.reads)
        for number in self.own:
            reads[number] = replace(reads[number], length=reads[number].length + steps)
        positions = tuple(position + steps for position in self.positions)
        return Layout(positions, tuple(slot + steps for slot in self.write_slots), tuple(reads), self.own)

    def slots_read_by(self, readers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Slots that are read, each run once; and how many they were if every row read all that it sees by itself.

        Args:
            readers: Who each token is of. No run is read by two of them.
        """
        found: dict[str, tuple[int, int]] = {}
        for read in self.reads:
            reader = readers[read.spans[0].first]
            shared, alone = found.get(reader, (0, 0))
            found[reader] = (shared + read.length, alone + read.length * len(read.spans))
        return found
