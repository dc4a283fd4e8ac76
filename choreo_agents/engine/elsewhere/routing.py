"""Where a call is run: by the engine that should have it done first, by counted bytes and tokens and measured costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

HOME_WINS_WITHIN = 0.1
"""A call stays where its thread is, unless it would be done elsewhere in so much less of the time."""


@dataclass(frozen=True)
class Costs:
    """What work costs on these machines: measured, never taken from the runs that are to be foretold."""

    call_s: float = 2e-3
    """To send a call, and have its answer back."""
    copy_s: float = 4e-3
    """To have KV copied between two engines, however little."""
    copy_bytes_per_s: float = 5e8
    encode_tokens_per_s: float = 4e3
    step_s: float = 8e-3
    """Of a step that samples one token."""
    row_s: float = 5e-4
    """That each further row adds to it."""

    def steps_s(self, samples: float, rows: int) -> float:
        """Seconds that a decode takes among so many others."""
        return samples * (self.step_s + self.row_s * rows)

    def encoding_s(self, tokens: int) -> float:
        """Seconds to encode tokens."""
        return tokens / self.encode_tokens_per_s

    def copying_s(self, nbytes: int) -> float:
        """Seconds to copy bytes of KV, beside what each copy costs."""
        return nbytes / self.copy_bytes_per_s


@dataclass(frozen=True)
class KVToRead:
    """A message that a call reads."""

    id: str
    nbytes: int
    """Of its KV."""
    holders: Collection[str] = ()
    """The engines that have it."""


@dataclass(frozen=True)
class CallToPlace:
    """A call, as far as it matters where it is run."""

    reads: Sequence[KVToRead]
    encodes: int
    """Tokens of its own turn that are given."""
    samples: float
    """Tokens that it is expected to sample."""
    home: str | None = None
    """The engine that its thread has been at last."""


@dataclass(frozen=True)
class EngineAhead:
    """An engine, and what is before it."""

    name: str
    rows: int = 0
    """Calls that it serves."""
    tokens: int = 0
    """That it has to encode for these before anything else."""
    again: Mapping[str, int] = field(default_factory=dict)
    """Tokens that it would have to encode to read each message that it lacks, with all that this comes from."""
    room_bytes: int = 0
    """Of KV that may be on its way to it now."""
    coming: Collection[str] = ()
    """Messages that calls before this one have copied there, or encoded again, and which it will have then."""
    holds: int = 0
    """Messages that it has."""


@dataclass(frozen=True)
class Route:
    """Where a call is run, and how that engine comes to what it lacks."""

    engine: str
    copies: Mapping[str, str]
    """Messages whose KV is copied, and from which engine."""
    encoded: Collection[str]
    """Messages that are encoded again."""
    bytes_copied: int
    tokens_encoded: int
    """Again, with what these come from."""
    expected_s: float
    """Until the call is done."""


class Routing(Protocol):
    """Decides where calls are run."""

    def __call__(self, call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
        """Where one is; asked under the front's lock, once for each call and once more when an engine was lost."""
        ...


def route(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """The way to run a call that is expected to end first.

    To each engine the call can be moved; what that lacks comes as KV from an engine that has it, or is encoded again,
    whichever takes less time. Where two are equally good the thread stays, and else the one with less to do has it, or
    with less to keep.

    Args:
        call: To be run.
        engines: That there are; at least one.
        costs: Of this machine.
    """
    ways = [_way(call, engine, costs) for engine in engines]
    load = {engine.name: (engine.tokens, engine.rows, engine.holds) for engine in engines}
    best = min(ways, key=lambda way: (way.expected_s, load[way.engine], way.engine))
    home = next((way for way in ways if way.engine == call.home), best)
    return home if home.expected_s <= best.expected_s * (1 + HOME_WINS_WITHIN) else best


def _way(call: CallToPlace, engine: EngineAhead, costs: Costs) -> Route:
    copies: dict[str, str] = {}
    encoded: list[str] = []
    sources: set[str] = set()
    copied = again = 0
    seconds = costs.call_s + costs.encoding_s(engine.tokens + call.encodes) + costs.steps_s(call.samples, engine.rows)
    for read in call.reads:
        if engine.name in read.holders or read.id in engine.coming:
            continue
        tokens = engine.again.get(read.id, 0)
        source = min(read.holders, key=lambda name: (name not in sources, name), default=None)
        copying_s = costs.copying_s(read.nbytes) + (0.0 if source in sources else costs.copy_s)
        if source is not None and copied + read.nbytes <= engine.room_bytes and copying_s < costs.encoding_s(tokens):
            copies[read.id] = source
            sources.add(source)
            copied += read.nbytes
            seconds += copying_s
        else:
            encoded.append(read.id)
            again += tokens
            seconds += costs.encoding_s(tokens)
    return Route(engine.name, copies, tuple(encoded), copied, again, seconds)
