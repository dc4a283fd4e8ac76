"""Whole workflows as one packed row of tokens: plain data, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class PackedTraces:
    """Several traces side by side: every message's tokens once, none of a trace sees any of another.

    row     | trace 0: message 0 | message 1 | ... | trace 1: message 0 | ... |
    bank    | the same rows                                                   | mapped messages |
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    """Where each token was encoded."""
    messages: tuple[PackedMessage, ...]
    mapped: tuple[MappedMessage, ...]
    predictors: tuple[int, ...]
    """Rows whose logits predict the learnt tokens: each stands just before its own."""
    targets: tuple[int, ...]
    """The learnt tokens."""
    owners: tuple[int, ...]
    """The number of each learnt token's trace."""
    rows_of_adapters: tuple[tuple[str, tuple[int, ...]], ...]
    """Which rows each adapter encodes."""
    traces: int
    """How many there are."""

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> PackedTraces:
        """Pack them in their order."""
        return _Packing(traces).packed()


class _Packing:
    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._messages: list[PackedMessage] = []
        self._mapped: list[MappedMessage] = []
        self._predictors: list[int] = []
        self._targets: list[int] = []
        self._owners: list[int] = []
        self._adapters: dict[str, list[int]] = {}
        self._bank = sum(trace.tokens for trace in traces)
        """The first row of the bank that is not taken."""

    def packed(self) -> PackedTraces:
        for number, trace in enumerate(self._traces):
            self._add(number, trace)
        return PackedTraces(
            tuple(self._tokens),
            tuple(self._positions),
            tuple(self._messages),
            tuple(self._mapped),
            tuple(self._predictors),
            tuple(self._targets),
            tuple(self._owners),
            tuple((name, tuple(rows)) for name, rows in self._adapters.items()),
            len(self._traces),
        )

    def _add(self, number: int, trace: Trace) -> None:
        firsts: dict[str, int] = {}
        for message in trace.messages:
            if message.mapped:
                firsts[message.name] = self._map(message, firsts[message.parents[0]])
                continue
            firsts[message.name] = len(self._tokens)
            parents = [trace.by_name[parent] for parent in message.parents]
            view = tuple(
                SeenRows(firsts[parent.name], len(parent.tokens), parent.new_offset, offset - parent.new_offset)
                for parent, offset in zip(parents, message.offsets, strict=True)
            )
            self._encode(number, message, view)

    def _map(self, message: TraceMessage, source: int) -> int:
        mapped = MappedMessage(source, self._bank, len(message.tokens), message.new_offset)
        self._mapped.append(mapped)
        self._bank += mapped.count
        return mapped.first

    def _encode(self, number: int, message: TraceMessage, view: tuple[SeenRows, ...]) -> None:
        first, count = len(self._tokens), len(message.tokens)
        self._messages.append(PackedMessage(first, count, message.new_offset, view))
        self._tokens.extend(message.tokens)
        self._positions.extend(range(message.new_offset, message.new_offset + count))
        if message.adapter is not None:
            self._adapters.setdefault(message.adapter, []).extend(range(first, first + count))
        if message.learn is not None:
            start, end = message.learn
            self._predictors.extend(range(first + start - 1, first + end - 1))
            self._targets.extend(message.tokens[start:end])
            self._owners.extend([number] * (end - start))
