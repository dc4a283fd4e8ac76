"""Does what a step says: maps KV, one forward pass, and a token for every row that samples; again, if that fails."""

from __future__ import annotations

import ctypes
import logging
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from choreo_agents.attention.layout import Layout
from choreo_agents.attention.packing import SentTables
from choreo_agents.attention.step import AttentionBackend, StepAttention
from choreo_agents.errors import CapacityError, DeviceLostError, error_text
from choreo_agents.kv.copying import Arrival, LayeredCopy
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.constraints.masks import StepMasks
from choreo_agents.models.lora import Adapted, LoraAdapter
from choreo_agents.native.library import Kernels, available_kernels, parallel
from choreo_agents.native.structs import DrawingStruct
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.passes import FixedPass, Passes, cuda_capture
from choreo_agents.runtime.step import Row, Step, StepMaker, make_step
from choreo_agents.sampling import BatchSampler, Lottery, SampledToken, Sampler, Tickets, choose_tokens
from choreo_agents.sampling.lottery import CONSTANTS
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.tracing import PerTenantCounters

_CAUTIOUS_STEPS = 64
"""After the device ran out of memory, steps until a larger one is tried."""
Samplers = Mapping[int, Sampler]
Wait = Callable[[int], None]
_log = logging.getLogger(__name__)


@dataclass
class StepResult:
    """What came of a step."""

    rows: Sequence[Row]
    """That it had."""
    samplers: Samplers
    """By request number, for every row that samples."""
    chosen: dict[int, SampledToken] = field(default_factory=dict)
    """By request, the token of every row that samples and did not fail."""
    failed: dict[int, Exception] = field(default_factory=dict)
    """By request, why it cannot go on."""
    passes: list[tuple[int, int, Exception]] = field(default_factory=list)
    """Passes that failed: their rows, their tokens and why."""

    def spoils(self, row: Row) -> Exception | None:
        """Why a row cannot run any more: it, or what it reads of the same step, has failed."""
        if not self.failed:
            return None
        own = self.failed.get(row.number)
        lost = {other.segment: self.failed[other.number] for other in self.rows if other.number in self.failed}
        unread = (lost.get(p.segment) for p in row.view if p.first + p.count > p.segment.encoded)
        return own or next((error for error in unread if error is not None), None)


class StepRetry:
    """Runs each step until all its rows have run or failed for themselves.

        a step fails     it is run once more: writing the same keys again changes nothing, and samplers, asked again,
                         say the same
        again            its halves are run one after the other, then theirs; who fails alone is given up, with all that
                         read in this step what it should have encoded
        out of memory    its halves at once, rows cut in two as well; later steps are no larger for a while
        device lost      `DeviceLostError`: nothing can be run any more

    Args:
        executor: Runs them.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._steps = StepMaker()
        self._most: int | None = None
        """Tokens of a pass at most, since a larger one ran out of memory; None: whatever is planned."""
        self._cautious = 0
        """Steps since then."""
        self._before: tuple[int | None, int] = None, 0
        """Both when this step began."""

    def run(self, rows: Sequence[Row], arrivals: Sequence[Arrival], samplers: Samplers) -> StepResult:
        """Run a step's rows.

        Args:
            rows: What to encode.
            arrivals: What the step brings into the pool. Those that do not get there stay undone.
            samplers: By request number, for every row that samples.

        Raises:
            DeviceLostError: The device computes no more.
        """
        ran = StepResult(rows, samplers)
        self._before = self._most, self._cautious
        if self._most is None or _tokens(rows) <= self._most:
            self._attempt(rows, arrivals, ran, tries=2)
        else:
            for part in _parts(_in_order(rows), self._most):
                self._attempt(part, _read_by(part, arrivals), ran, tries=2)
        for arrival in arrivals:
            if not arrival.is_there:
                self._bring(arrival, ran)
        self._grow_bolder()
        return ran

    def _attempt(self, part: Sequence[Row], arrivals: Sequence[Arrival], ran: StepResult, tries: int) -> None:
        """Run a part of a step as often as this; if it fails, its halves, and who stands alone is to blame."""
        rows = list(part)
        for row in part if ran.failed else ():
            error = ran.spoils(row)
            if error is not None:
                ran.failed.setdefault(row.number, error)
                rows.remove(row)
        if ran.rows and not rows:
            return
        failure: Exception
        while True:
            tries -= 1
            try:
                ran.chosen |= self._executor.run(self._steps.make(rows, arrivals), ran.samplers)
                return
            except Exception as error:
                failure = error
            _forget_locals(failure)
            ran.passes.append((len(rows), _tokens(rows), failure))
            if not self._executor.answers():
                raise DeviceLostError(
                    f"the device computes no more ({error_text(failure)}): load the engine again, in a new process"
                ) from failure
            full = is_out_of_memory(failure)
            if full:
                self._be_cautious(_tokens(rows))
            if not tries or (full and _tokens(rows) > 1):
                break
        if full and _tokens(rows) > 1:
            halves = list(_parts(_in_order(rows), -(-_tokens(rows) // 2)))
        elif len(rows) > 1:
            ordered, middle = _in_order(rows), len(rows) // 2
            halves = [ordered[:middle], ordered[middle:]]
        else:
            self._give_up(rows, _no_memory(failure) if full else failure, ran)
            return
        for half in halves:
            # Who stands alone is not given up for a failure that comes and goes.
            self._attempt(half, _read_by(half, arrivals), ran, tries=2 if len(half) == 1 else 1)

    def _give_up(self, rows: Sequence[Row], failure: Exception, ran: StepResult) -> None:
        """Who stands alone has failed, at most one."""
        ran.failed |= {row.number: failure for row in rows}
        if isinstance(failure, CapacityError):
            # A token alone: it is what it reads that is too much, and no reason for others' steps to be small.
            self._most, self._cautious = self._before

    def _bring(self, arrival: Arrival, ran: StepResult) -> None:
        """Bring what no row that ran has read; if it cannot be brought, it stays undone."""
        try:
            self._executor.run(make_step([], [arrival]), {})
        except Exception as error:
            _forget_locals(error)
            ran.passes.append((0, 0, error))

    def _be_cautious(self, tokens: int) -> None:
        self._executor.free_cached()
        half = max(1, tokens // 2)
        self._most, self._cautious = half if self._most is None else min(self._most, half), 0

    def _grow_bolder(self) -> None:
        if self._most is None:
            return
        self._cautious += 1
        if self._cautious >= _CAUTIOUS_STEPS:
            self._most, self._cautious = self._most * 2, 0
            if self._most > 1 << 20:
                self._most = None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it, or what it comes from, says that device or host have no memory left for what a pass computes with."""
    causes: list[BaseException] = [error]
    for each in causes:
        said = error_text(each).lower()
        is_said = isinstance(each, RuntimeError) and ("out of memory" in said or "allocate memory" in said)
        if is_said or isinstance(each, MemoryError | torch.OutOfMemoryError):
            return True
        if each.__cause__ is not None and not any(each.__cause__ is known for known in causes):
            causes.append(each.__cause__)
    return False


def _forget_locals(failure: BaseException) -> None:
    """Let go of what a failed pass computed with: its error outlives it, and names all that its functions had.

    What is tried next has that memory, and who is told of the error sees no other call's tokens there.
    """
    left: list[BaseException | None] = [failure]
    for error in left:
        if error is not None:
            traceback.clear_frames(error.__traceback__)
            left += [each for each in (error.__cause__, error.__context__) if each not in left]


def _no_memory(cause: Exception) -> CapacityError:
    error = CapacityError(
        f"the device has no memory left for a step of one token: {error_text(cause)}. Release messages, give the "
        "engine a smaller kv_budget_bytes, or try again when others have ended"
    )
    error.__cause__ = cause
    return error


def _in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows behind those of the same step that they read."""
    by_segment: dict[Segment, Row] = {row.segment: row for row in rows}
    ordered: dict[int, Row] = {}

    def put(row: Row) -> None:
        if row.number not in ordered:
            for piece in row.view:
                if piece.segment in by_segment and piece.segment is not row.segment:
                    put(by_segment[piece.segment])
            ordered[row.number] = row

    for row in rows:
        put(row)
    return list(ordered.values())


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) for row in rows)


def _parts(rows: Sequence[Row], most: int) -> Iterator[list[Row]]:
    """Rows in passes of at most so many tokens, cut where they are longer."""
    part: list[Row] = []
    room = most
    for row in rows:
        left = row
        while len(left.tokens) > room:
            if room:
                part.append(left._replace(tokens=left.tokens[:room], samples=False))
                left = left._replace(tokens=left.tokens[room:], first=left.first + room)
            yield part
            part, room = [], most
        part.append(left)
        room -= len(left.tokens)
    if part:
        yield part


def _read_by(rows: Sequence[Row], arrivals: Sequence[Arrival]) -> list[Arrival]:
    """What of a step's arrivals some of its rows read, and is not there yet."""
    read = {piece.segment for row in rows for piece in row.view}
    return [arrival for arrival in arrivals if arrival.segment in read and not arrival.is_there]


class Executor:
    """Owns the model, the pool's tensors and the attention backend; decides nothing.

    Args:
        adapter: The model.
        pool: Where KV lives.
        backend: Attends.
        counters: Counts what is read.
        loras: Adapters by fingerprint, and `mappers` likewise; both may grow.
        graphs: Whether passes that recur may be captured, where the device can do that.
        ahead: Whether these are begun a step ahead.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        pool: KVPool,
        backend: AttentionBackend,
        counters: PerTenantCounters[Counters],
        loras: Mapping[str, LoraAdapter],
        mappers: Mapping[str, CacheMapper],
        *,
        graphs: bool,
        ahead: bool,
    ) -> None:
        self.adapter = adapter
        self.pool = pool
        self.backend = backend
        self.counters = counters
        self._batch = BatchSampler(lottery_on(adapter.device))
        self._masks = StepMasks(adapter.device)
        is_cuda = adapter.device.type == "cuda"
        self.passes = Passes(adapter, pool, backend, cuda_capture(adapter.device) if graphs and is_cuda else None)
        self.forward = Forward(adapter, pool, backend, counters, self.passes, loras, ahead=ahead)
        self._mappers = mappers

    def run(self, step: Step, samplers: Samplers) -> dict[int, SampledToken]:
        """Encode the step's tokens and return each sampling request's next token.

        Args:
            step: What to run.
            samplers: By request number, for every row that samples.
        """
        with LayeredCopy(self.pool, step.arrivals) as arriving:
            for row in step.mapped:
                self._map(row, arriving.wait)
            if not step.tokens:
                return {}
            numbers = [row.number for row in step.rows if row.samples]
            asked = [samplers[number] for number in numbers]
            with self._masks.filling(sampler.constraint for sampler in asked):
                logits = self.forward.logits(step, arriving.wait)
            meanwhile = self.forward.meanwhile
            if meanwhile is not None:
                logits = logits.clone()  # the next pass is where this one was
            return dict(zip(numbers, choose_tokens(asked, logits, self._batch, meanwhile), strict=True))

    def answers(self) -> bool:
        """Whether the device still computes; asked after a failure."""
        if self.adapter.device.type == "cpu":
            return True
        try:
            return float(torch.ones(1, device=self.adapter.device).add_(1)) == 2.0
        except torch.OutOfMemoryError:
            return True
        except RuntimeError:
            return False

    def free_cached(self) -> None:
        """Let the device have back what torch keeps of it for later, and what recurring passes keep."""
        self.forward.forget()
        if self.adapter.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _map(self, row: Row, wait: Wait) -> None:
        """Fill a row's slots with what a mapper makes of the KV of its one piece."""
        mapper, [piece] = self._mappers[row.mapper], row.view
        source = self._slots(piece.segment, row.first, len(row.tokens))
        target = self._slots(row.segment, row.first, len(row.tokens))
        first = row.segment.native_offset + row.first
        positions = torch.arange(first, first + len(row.tokens), device=source.device)
        for layer, (keys, values) in enumerate(zip(self.pool.keys, self.pool.values, strict=True)):
            wait(layer)
            moved = mapper.moved(layer, keys[:, source], piece.shift)
            keys[:, target], values[:, target] = mapper.map(layer, moved, values[:, source], positions)

    def _slots(self, segment: Segment, first: int, count: int) -> Tensor:
        runs = segment.slots(first, count)
        return torch.cat([torch.arange(run.start, run.end) for run in runs]).to(self.adapter.device)


def lottery_on(device: torch.device) -> Lottery | None:
    """That of a device: kernels in Triton on a GPU, those in C on a CPU; None if there are none."""
    made, kernels = Lottery.on(device), available_kernels()
    if made is not None or device.type != "cpu" or isinstance(kernels, str):
        return made
    return native_lottery(kernels[0])


def native_lottery(kernels: Kernels) -> Lottery:
    """That of the kernels in C, for logits in fp32."""

    def launch(logits: Tensor, asked: Tensor, told: Tensor) -> None:
        drawing = DrawingStruct(
            logits=logits.data_ptr(),
            asked=asked.data_ptr(),
            told=told.data_ptr(),
            row=logits.stride(0),
            draws=len(asked),
            words=logits.shape[1],
            threads=torch.get_num_threads(),
            margin=CONSTANTS["MARGIN"],
            lost=CONSTANTS["LOST"],
            alike=CONSTANTS["ALIKE"],
            least=CONSTANTS["LEAST"],
            lowest=CONSTANTS["LOWEST"],
            highest=CONSTANTS["HIGHEST"],
            parallel=parallel(),
        )
        kernels.draw(ctypes.addressof(drawing))

    return Lottery(launch, (torch.float32,))


class Forward:
    """Runs the passes of an engine's steps, some before they are asked for.

        step t      pass ── winners of its rows, as a GPU guesses them ── step t+1's pass, begun ── wait ── account
        step t+1    logits of that pass, for every row that goes on with what was guessed ───────── ...

    Before the host knows what step t has said, the device computes the step after it: with the tokens that it has drawn
    itself. Who then goes on with another token, sees something new, or comes, is computed as if nothing had been; who
    has ended has written what it said where it would have been written anyway.

    Args:
        adapter: The model.
        pool: Where KV lives.
        backend: Attends.
        counters: Counts what is read.
        passes: Those that recur.
        loras: Adapters by fingerprint.
        ahead: Whether captured passes are begun a step ahead; may be changed between steps.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        pool: KVPool,
        backend: AttentionBackend,
        counters: PerTenantCounters[Counters],
        passes: Passes,
        loras: Mapping[str, LoraAdapter],
        *,
        ahead: bool,
    ) -> None:
        self._adapter, self._pool, self._backend, self._counters = adapter, pool, backend, counters
        self._passes, self._loras = passes, loras
        self.goes_ahead = ahead
        self._is_refused = False
        """Whether a pass could not be begun ahead: none is tried again until there is room."""
        self._last: _Last | None = None
        self._ahead: _Ahead | None = None
        self._next: tuple[Step, _Last] | None = None
        """The step under way, if the one after it may be begun."""
        self.steps_ahead = 0
        """Steps that were there, all or some of their rows, when they were asked for."""

    def logits(self, step: Step, wait: Wait) -> Tensor:
        """What the step's rows sample from: [rows that sample, vocabulary].

        Args:
            step: Has tokens.
            wait: Returns when a layer of what the step brings is there.
        """
        ahead, self._ahead, self._next = self._ahead, None, None
        places = {} if ahead is None else ahead.places(step.rows)
        if ahead is None or not places:
            return self._run(step, wait)
        if not self._passes.are_current():  # it was begun with weights that are the model's no more
            self.forget()
            return self._run(step, wait)
        self.steps_ahead += 1
        self._count(ahead.last.attention, ahead.step.rows, {row.tenant for row in step.rows})
        rest = [row for row in step.rows if row.number not in places]
        wanted = [places[row.number] for row in step.rows if row.samples and row.number in places]
        is_all = wanted == list(range(len(ahead.step.rows)))
        logits = ahead.logits if is_all else ahead.logits[wanted]
        if not rest:
            if step.layout is ahead.last.layout and step.further == ahead.last.further:  # it was made for this step
                self._last = ahead.last._replace(is_ahead=False)
                self._look_ahead(step, self._last)
            return logits
        part = make_step(rest, step.arrivals)
        if not part.tokens:
            return logits
        if not part.wanted:
            logits = logits.clone() if is_all else logits
            self._run(part, wait)
            return logits
        return self._together(step, part, places, logits.clone() if is_all else logits, wait)

    def _together(self, step: Step, part: Step, places: Mapping[int, int], known: Tensor, wait: Wait) -> Tensor:
        """Logits that are known, and those of a part that has to be computed, in the order of the step."""
        computed = self._run(part, wait)
        self._next = None
        of_known, of_part = iter(range(len(known))), iter(range(len(known), len(known) + len(computed)))
        order = [next(of_known if row.number in places else of_part) for row in step.rows if row.samples]
        return torch.cat((known, computed))[order]

    @property
    def meanwhile(self) -> Callable[[Tickets], None] | None:
        """To be called with what the step's rows will all but surely say, before the device is waited for: begins the
        step after it. None if that cannot be begun. What `logits` gave is then lost.
        """
        return None if self._next is None else self._begin

    def _begin(self, tickets: Tickets) -> None:
        assert self._next is not None
        (step, last), self._next, self._last = self._next, None, None
        assert last.recurring is not None
        try:
            if not last.attention.follow():
                return
            positions = [at + 1 for at in step.positions]
            logits = last.recurring.logits(tickets.guesses, positions, last.attention, step.wanted)
        except Exception as error:  # the step itself has not failed: whatever it is, the next pass will meet it
            self._is_refused = True
            _log.warning("a step could not be begun ahead: %s", error_text(error))
            return
        self._last = last._replace(further=last.further + 1, is_ahead=True)
        self._ahead = _Ahead(step, tickets, self._last, logits)

    def _look_ahead(self, step: Step, last: _Last) -> None:
        is_captured = last.recurring is not None and last.recurring.is_captured
        may = self.goes_ahead and not self._is_refused and is_captured
        if may and step.further < step.room and len(step.wanted) == len(step.rows):
            self._next = step, last

    def _run(self, step: Step, wait: Wait) -> Tensor:
        """Compute a step's rows."""
        adapted = self._adapted(step)
        last = self._attention(step, wait)
        if last.recurring is None:
            logits = self._adapter.logits(step.tokens, step.positions, last.attention, step.wanted, adapted=adapted)
        else:
            logits = self._passes.logits(last.recurring, step.tokens, step.positions, last.attention, step.wanted)
            self._look_ahead(step, last)
        self._count(last.attention, step.rows)  # while a device computes
        return logits

    def _count(self, attention: StepAttention, rows: Sequence[Row], tenants: Container[str] | None = None) -> None:
        """Count what rows read: those of some tenants, or of all."""
        readers = [row.tenant for row in rows if not row.mapper for _ in row.tokens]
        for tenant, (shared, alone) in attention.kv_bytes_read(readers).items():
            if tenants is not None and tenant not in tenants:
                continue  # it has left
            self._counters.add(tenant, "kv_bytes_read", shared)
            self._counters.add(tenant, "kv_bytes_unshared", alone)

    def _attention(self, step: Step, wait: Wait) -> _Last:
        """The step's attention: that of the step before, if it can go on one token further. And its pass, if passes of
        its sizes recur.
        """
        last, self._last = self._last, None
        if last is not None and step.further and last.layout is step.layout:
            is_there = last.is_ahead and last.further == step.further
            if is_there or (not last.is_ahead and last.further + 1 == step.further and last.attention.follow()):
                self._last = last._replace(further=step.further, is_ahead=False)
                return self._last
        layout = step.layout.grown(step.further)
        alike = None if step.arrivals or step.adapted else self._passes.find(layout, len(step.wanted))
        if alike is None:
            attention = StepAttention(layout, self._pool, self._backend, self._adapter.kinds, wait)
            made = _Last(step.layout, step.further, attention, None)
        else:
            made = _Last(step.layout, step.further, alike[1], alike[0])
        if layout.own and not step.arrivals:
            self._last = made
        return made

    def _adapted(self, step: Step) -> list[Adapted]:
        """The step's tokens by the adapter that serves them."""
        made: list[Adapted] = []
        for key, tokens in step.adapted.items():
            rows = None
            if len(tokens) < len(step.tokens):
                rows = SentTables({"rows": numpy.array(tokens, dtype=numpy.int64)}, self._adapter.device)["rows"]
            made.append((self._loras[key], rows))
        return made

    def forget(self) -> None:
        """Let go of what it keeps for the next step."""
        self._last = self._ahead = self._next = None
        self._is_refused = False
        self._passes.forget()


class _Last(NamedTuple):
    """What the next step's attention may be made of."""

    layout: Layout
    further: int
    """How many steps the attention is further than the layout."""
    attention: StepAttention
    recurring: FixedPass | None
    is_ahead: bool = False
    """Whether the step that it is of has not come yet."""


class _Ahead(NamedTuple):
    """A pass whose step has not come yet."""

    step: Step
    """The one before it, of the same rows."""
    tickets: Tickets
    """What these were guessed to say."""
    last: _Last
    logits: Tensor
    """[rows, vocabulary], until the next pass."""

    def places(self, rows: Sequence[Row]) -> dict[int, int]:
        """Where those of some rows stand that it has computed, by number."""
        guesses = self.tickets.guessed()
        before = {row.number: (place, row) for place, row in enumerate(self.step.rows)}
        found: dict[int, int] = {}
        for row in rows:
            place, was = before.get(row.number, (0, None))
            if was is None or row.segment is not was.segment or row.view is not was.view or row.mapper or row.adapter:
                continue
            if row.first == was.first + 1 and row.tokens == (guesses[place],):
                found[row.number] = place
        return found
