"""Where a call is run: by the engine that should have it done first, by counted bytes and tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

HOME_WINS_WITHIN = 0.3
"""A call stays where its thread is, unless it takes so much longer there than elsewhere. Rows of one step are all but
free, and what a call leaves behind is encoded again where others wait for that."""


@dataclass(frozen=True)
class Costs:
    """What work costs on these machines, all engines alike; by default as on a CPU."""

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


def route(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """The way to run a call that is expected to end first.

    To each engine the call can be moved; what that lacks comes as KV from engines that have it, or is encoded again,
    whichever takes less time in all. Where two are about equally good the thread stays, and else the one with less to
    do has it, or with less to keep.

    Args:
        call: To be run.
        engines: That there are; at least one.
        costs: Of this machine.
    """
    ways = [_way(call, engine, costs) for engine in _eligible(call, engines, costs)]
    load = {engine.name: (engine.tokens, engine.rows, engine.holds) for engine in engines}
    best = min(ways, key=lambda way: (way.expected_s, load[way.engine], way.engine))
    home = next((way for way in ways if way.engine == call.home), best)
    return home if home.expected_s <= best.expected_s * (1 + HOME_WINS_WITHIN) else best


def _eligible(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> list[EngineAhead]:
    """Those that can be best: of engines that have the same of what a call reads, the one with the least to do."""

    def load(engine: EngineAhead) -> tuple[float, int, int, int, str]:
        busy_s = costs.encoding_s(engine.tokens) + costs.steps_s(call.samples, engine.rows)
        return busy_s, engine.tokens, engine.rows, engine.holds, engine.name

    least: dict[object, EngineAhead] = {}
    for engine in engines:
        there = tuple(engine.name in read.holders or read.id in engine.coming for read in call.reads)
        # Engines that lack the same share what they encode again: to compare that would take longer than it saves.
        key = engine.name if engine.name == call.home else (there, engine.room_bytes, id(engine.again))
        if key not in least or load(engine) < load(least[key]):
            least[key] = engine
    return list(least.values())


def _way(call: CallToPlace, engine: EngineAhead, costs: Costs) -> Route:
    lacking = [read for read in call.reads if engine.name not in read.holders and read.id not in engine.coming]
    copies = _copies(lacking, engine, costs)
    encoded = tuple(read.id for read in lacking if read.id not in copies)
    copied = sum(read.nbytes for read in lacking if read.id in copies)
    again = sum(engine.again.get(each, 0) for each in encoded)
    seconds = costs.call_s + costs.encoding_s(engine.tokens + call.encodes) + costs.steps_s(call.samples, engine.rows)
    seconds += len(set(copies.values())) * costs.copy_s + costs.copying_s(copied) + costs.encoding_s(again)
    return Route(engine.name, copies, encoded, copied, again, seconds)


def _copies(lacking: Sequence[KVToRead], engine: EngineAhead, costs: Costs) -> dict[str, str]:
    """What is copied, and from where, if the rest is encoded.

    What it takes to begin a copy is shared by all that comes with it: from one engine after the other, the one that
    saves most first, comes all that takes less time to copy than to encode, as long as that is worth the beginning.
    """
    saved = {read.id: costs.encoding_s(engine.again.get(read.id, 0)) - costs.copying_s(read.nbytes) for read in lacking}
    left = [read for read in lacking if read.holders and saved[read.id] > 0]
    copies: dict[str, str] = {}
    room = engine.room_bytes
    while left:
        offers = {name: _fitting(reads, room) for name, reads in _sources(left).items()}
        gains = {name: sum(saved[read.id] for read in offer) for name, offer in offers.items()}
        source = max(gains, key=gains.__getitem__)
        if gains[source] <= costs.copy_s:
            break
        copies |= dict.fromkeys((read.id for read in offers[source]), source)
        room -= sum(read.nbytes for read in offers[source])
        left = [read for read in left if read.id not in copies]
    return copies


def _sources(reads: Sequence[KVToRead]) -> dict[str, list[KVToRead]]:
    """What engines have of messages; of those that have the same, the first by name."""
    had: defaultdict[str, list[KVToRead]] = defaultdict(list)
    for read in reads:
        for name in read.holders:
            had[name].append(read)
    first: dict[tuple[str, ...], str] = {}
    for name in sorted(had):
        first.setdefault(tuple(read.id for read in had[name]), name)
    return {name: had[name] for name in first.values()}


def _fitting(reads: Sequence[KVToRead], room: int) -> list[KVToRead]:
    """As many of them as there is room for on the way."""
    found: list[KVToRead] = []
    for read in reads:
        if read.nbytes <= room:
            found.append(read)
            room -= read.nbytes
    return found
