"""Whole workflows as one packed row of tokens: plain data, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from choreo_agents.training.trace import Trace, TraceMessage


@dataclass(frozen=True)
class SeenRows:
    """A message as another sees it: rows `first` to `first + count` of the bank, `shift` positions further.

    The bank holds the row's tokens in their order, then those of mapped messages, which the row does not hold.
    """

    first: int
    count: int
    position: int
    """Where its first token was encoded."""
    shift: int


@dataclass(frozen=True)
class PackedMessage:
    """A message of the row: `count` tokens from `first` on, the first of them at `position`."""

    first: int
    count: int
    position: int
    view: tuple[SeenRows, ...]
    """Its parents, in order."""


@dataclass(frozen=True)
class MappedMessage:
    """Rows of the bank, from `first` on, whose KV is made of that of as many rows from `source` on."""

    source: int
    first: int
    count: int
    position: int


@dataclass
class PackedTraces:
    """Several traces side by side: every message's tokens once, none of a trace sees any of another.

    row     | trace 0: message 0 | message 1 | ... | trace 1: message 0 | ... |
    bank    | the same rows                                                   | mapped messages |
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Where each token was encoded."""
    messages: list[PackedMessage] = field(default_factory=list)
    mapped: list[MappedMessage] = field(default_factory=list)
    predictors: list[int] = field(default_factory=list)
    """Rows whose logits predict the learnt tokens: each stands just before its own."""
    targets: list[int] = field(default_factory=list)
    """The learnt tokens."""
    owners: list[int] = field(default_factory=list)
    """The number of each learnt token's trace."""
    rows_of_adapters: dict[str, list[int]] = field(default_factory=dict)
    """Which rows each adapter encodes."""

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> PackedTraces:
        """Pack them in their order."""
        packed, bank = cls(), sum(trace.tokens for trace in traces)
        for number, trace in enumerate(traces):
            firsts: dict[str, int] = {}
            for message in trace.messages:
                if not message.mapped:
                    firsts[message.name] = len(packed.tokens)
                    packed._encode(number, message, _view(trace, message, firsts))
                    continue
                firsts[message.name], count = bank, len(message.tokens)
                packed.mapped.append(MappedMessage(firsts[message.parents[0]], bank, count, message.new_offset))
                bank += count
        return packed

    def _encode(self, number: int, message: TraceMessage, view: tuple[SeenRows, ...]) -> None:
        first, count = len(self.tokens), len(message.tokens)
        self.messages.append(PackedMessage(first, count, message.new_offset, view))
        self.tokens.extend(message.tokens)
        self.positions.extend(range(message.new_offset, message.new_offset + count))
        if message.adapter is not None:
            self.rows_of_adapters.setdefault(message.adapter, []).extend(range(first, first + count))
        if message.learn is not None:
            start, end = message.learn
            self.predictors.extend(range(first + start - 1, first + end - 1))
            self.targets.extend(message.tokens[start:end])
            self.owners.extend([number] * (end - start))


def _view(trace: Trace, message: TraceMessage, firsts: Mapping[str, int]) -> tuple[SeenRows, ...]:
    """A message's parents, whose rows begin at `firsts`."""
    parents = [trace.by_name[parent] for parent in message.parents]
    return tuple(
        SeenRows(firsts[parent.name], len(parent.tokens), parent.new_offset, offset - parent.new_offset)
        for parent, offset in zip(parents, message.offsets, strict=True)
    )
