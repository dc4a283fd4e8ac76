"""Placement of calls: on the engine that should finish first, by counted bytes and tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

HOME_WINS_WITHIN = 0.3
"""A call stays on its thread's engine unless it takes longer there by more than this share. Rows of one step are nearly
free, and what a call leaves behind is encoded again by engines that need it."""


@dataclass(frozen=True)
class Costs:
    """Costs of work on these machines, the same for all engines; by default those of a CPU."""

    call_s: float = 2e-3
    """Seconds to send a call and receive its answer."""
    copy_s: float = 4e-3
    """Seconds that each copy of KV between two engines adds, whatever its size."""
    copy_bytes_per_s: float = 5e8
    encode_tokens_per_s: float = 4e3
    step_s: float = 8e-3
    """Seconds of a step that samples one token."""
    row_s: float = 5e-4
    """Seconds that each further row adds to a step."""

    def steps_s(self, samples: float, rows: int) -> float:
        """Return the seconds that a decode takes among other rows."""
        return samples * (self.step_s + self.row_s * rows)

    def encoding_s(self, tokens: int) -> float:
        """Return the seconds to encode tokens."""
        return tokens / self.encode_tokens_per_s

    def copying_s(self, nbytes: int) -> float:
        """Return the seconds to copy bytes of KV, without what each copy adds."""
        return nbytes / self.copy_bytes_per_s


@dataclass(frozen=True)
class KVToRead:
    """A message that a call reads."""

    id: str
    nbytes: int
    """Bytes of its KV."""
    holders: Collection[str] = ()
    """Engines that have it."""


@dataclass(frozen=True)
class CallToPlace:
    """The parts of a call that decide its placement."""

    reads: Sequence[KVToRead]
    encodes: int
    """Tokens of its own prompt."""
    samples: float
    """Tokens that it is expected to sample."""
    home: str | None = None
    """Engine where its thread was last."""


@dataclass(frozen=True)
class EngineAhead:
    """An engine, and the work that is queued there."""

    name: str
    rows: int = 0
    """Number of calls that it runs."""
    tokens: int = 0
    """Tokens that it has to encode for these before anything else."""
    again: Mapping[str, int] = field(default_factory=dict)
    """Tokens that it would encode to read each message that it lacks, all ancestors included, by id."""
    room_bytes: int = 0
    """Bytes of KV that may still be sent to it now."""
    incoming: Collection[str] = ()
    """Messages that it lacks, but will have by then, since calls before this one copy or encode them there."""
    holds: int = 0
    """Number of messages that it has."""


@dataclass(frozen=True)
class Route:
    """The engine for a call, and how it gets the messages that it lacks."""

    engine: str
    copies: Mapping[str, str]
    """Engine from which each message's KV is copied, by id."""
    encoded: Collection[str]
    """Messages that are encoded again."""
    bytes_copied: int
    tokens_encoded: int
    """Tokens that are encoded again, all ancestors included."""
    expected_s: float
    """Seconds until the call is done."""


def route(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """Return the route by which a call is expected to end first.

    The call can run on any engine; a message that this lacks is copied from an engine that has it, or encoded again,
    whichever takes less time in all. If two are about equally good, the call stays with its thread, and otherwise goes
    to the one with less to do, or with less to keep.

    Args:
        call: Call to place.
        engines: All engines; at least one.
        costs: Costs on these machines.
    """
    routes = [_route_by(call, engine, costs) for engine in _eligible(call, engines, costs)]
    load = {engine.name: (engine.tokens, engine.rows, engine.holds) for engine in engines}
    best = min(routes, key=lambda candidate: (candidate.expected_s, load[candidate.engine], candidate.engine))
    home = next((candidate for candidate in routes if candidate.engine == call.home), best)
    return home if home.expected_s <= best.expected_s * (1 + HOME_WINS_WITHIN) else best


def _eligible(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> list[EngineAhead]:
    """Return the engines that can be best: the least busy of those that have the same of what a call reads."""

    def load(engine: EngineAhead) -> tuple[float, int, int, int, str]:
        busy_s = costs.encoding_s(engine.tokens) + costs.steps_s(call.samples, engine.rows)
        return busy_s, engine.tokens, engine.rows, engine.holds, engine.name

    least: dict[object, EngineAhead] = {}
    for engine in engines:
        present = tuple(engine.name in read.holders or read.id in engine.incoming for read in call.reads)
        # Engines that lack the same share one `again`: to compare its content would take longer than it saves.
        key = engine.name if engine.name == call.home else (present, engine.room_bytes, id(engine.again))
        if key not in least or load(engine) < load(least[key]):
            least[key] = engine
    return list(least.values())


def _route_by(call: CallToPlace, engine: EngineAhead, costs: Costs) -> Route:
    missing = [read for read in call.reads if engine.name not in read.holders and read.id not in engine.incoming]
    copies = _choose_copies(missing, engine, costs)
    encoded = tuple(read.id for read in missing if read.id not in copies)
    copied = sum(read.nbytes for read in missing if read.id in copies)
    again = sum(engine.again.get(message_id, 0) for message_id in encoded)
    seconds = costs.call_s + costs.encoding_s(engine.tokens + call.encodes) + costs.steps_s(call.samples, engine.rows)
    seconds += len(set(copies.values())) * costs.copy_s + costs.copying_s(copied) + costs.encoding_s(again)
    return Route(engine.name, copies, encoded, copied, again, seconds)


def _choose_copies(missing: Sequence[KVToRead], engine: EngineAhead, costs: Costs) -> dict[str, str]:
    """Choose which messages are copied, and from where, if the others are encoded.

    A copy has a fixed cost that all messages from one engine share. Engines are taken one by one, the one that saves
    most first: it sends all that is faster to copy than to encode, as long as this saves more than the fixed cost.
    """
    saved = {read.id: costs.encoding_s(engine.again.get(read.id, 0)) - costs.copying_s(read.nbytes) for read in missing}
    remaining = [read for read in missing if read.holders and saved[read.id] > 0]
    copies: dict[str, str] = {}
    room = engine.room_bytes
    while remaining:
        offers = {name: _take_fitting(reads, room) for name, reads in _by_engine(remaining).items()}
        gains = {name: sum(saved[read.id] for read in offer) for name, offer in offers.items()}
        source = max(gains, key=gains.__getitem__)
        if gains[source] <= costs.copy_s:
            break
        copies |= dict.fromkeys((read.id for read in offers[source]), source)
        room -= sum(read.nbytes for read in offers[source])
        remaining = [read for read in remaining if read.id not in copies]
    return copies


def _by_engine(reads: Sequence[KVToRead]) -> dict[str, list[KVToRead]]:
    """Return the messages that each engine has; of engines that have the same, only the first by name."""
    had: defaultdict[str, list[KVToRead]] = defaultdict(list)
    for read in reads:
        for name in read.holders:
            had[name].append(read)
    first: dict[tuple[str, ...], str] = {}
    for name in sorted(had):
        first.setdefault(tuple(read.id for read in had[name]), name)
    return {name: had[name] for name in first.values()}


def _take_fitting(reads: Sequence[KVToRead], room: int) -> list[KVToRead]:
    """Return as many of the messages as fit into the bytes."""
    fitting: list[KVToRead] = []
    for read in reads:
        if read.nbytes <= room:
            fitting.append(read)
            room -= read.nbytes
    return fitting
