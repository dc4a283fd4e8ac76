"""Runs a step: maps KV, does one forward pass, samples a token for every row that samples, and retries failures."""

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
from choreo_agents.sampling import BatchSampler, DrawKernel, DrawnTokens, SampledToken, Sampler, choose_tokens
from choreo_agents.sampling.kernel import CONSTANTS
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.tracing import PerTenantCounters

_CAUTIOUS_STEPS = 64
"""Steps after the device ran out of memory until a larger one is tried."""
Samplers = Mapping[int, Sampler]
Wait = Callable[[int], None]
_log = logging.getLogger(__name__)


@dataclass
class StepResult:
    """Outcome of a step."""

    rows: Sequence[Row]
    """Rows of the step."""
    samplers: Samplers
    """Samplers by request number, for every row that samples."""
    chosen: dict[int, SampledToken] = field(default_factory=dict)
    """Sampled token by request number, for every row that samples and did not fail."""
    failed: dict[int, Exception] = field(default_factory=dict)
    """Error by request number, for rows that cannot go on."""
    passes: list[tuple[int, int, Exception]] = field(default_factory=list)
    """Failed passes: number of rows, number of tokens, and error."""

    def failure_of(self, row: Row) -> Exception | None:
        """Return why a row cannot run any more: it, or a row of this step that it reads, has failed."""
        if not self.failed:
            return None
        own = self.failed.get(row.number)
        lost = {r.segment: self.failed[r.number] for r in self.rows if r.number in self.failed}
        unread = (lost.get(p.segment) for p in row.view if p.first + p.count > p.segment.encoded)
        return own or next((error for error in unread if error is not None), None)


class StepRetry:
    """Runs each step until every row has run or failed by itself.

        a step fails     it is run once more: rewriting the same keys changes nothing, and samplers choose the same
        fails again      its halves are run one after the other, then theirs; a row that fails alone is given up, with
                         all rows of this step that read what it should have encoded
        out of memory    its halves at once, rows cut in two as well; later steps stay smaller for a while
        device lost      `DeviceLostError`: nothing can be run any more

    Args:
        executor: Runs the steps.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._steps = StepMaker()
        self._most: int | None = None
        """Most tokens of a pass, set after a larger one ran out of memory; None: no limit."""
        self._cautious = 0
        """Steps since the limit was last changed."""
        self._before: tuple[int | None, int] = None, 0
        """Both as they were when this step began."""

    def run(self, rows: Sequence[Row], arrivals: Sequence[Arrival], samplers: Samplers) -> StepResult:
        """Run a step's rows.

        Args:
            rows: Rows to encode.
            arrivals: KV that the step brings into the pool. What cannot be brought stays absent.
            samplers: Samplers by request number, for every row that samples.

        Raises:
            DeviceLostError: The device computes no more.
        """
        result = StepResult(rows, samplers)
        self._before = self._most, self._cautious
        if self._most is None or _count_tokens(rows) <= self._most:
            self._attempt(rows, arrivals, result, tries=2)
        else:
            for part in _split_rows(_order_by_reads(rows), self._most):
                self._attempt(part, _arrivals_read_by(part, arrivals), result, tries=2)
        for arrival in arrivals:
            if not arrival.is_there:
                self._bring(arrival, result)
        self._raise_limit()
        return result

    def _attempt(self, part: Sequence[Row], arrivals: Sequence[Arrival], result: StepResult, tries: int) -> None:
        """Run part of a step up to `tries` times; if it keeps failing, run its halves, down to the row that fails
        alone."""
        rows = list(part)
        for row in part if result.failed else ():
            error = result.failure_of(row)
            if error is not None:
                result.failed.setdefault(row.number, error)
                rows.remove(row)
        if result.rows and not rows:
            return
        failure: Exception
        while True:
            tries -= 1
            try:
                result.chosen |= self._executor.run(self._steps.make(rows, arrivals), result.samplers)
                return
            except Exception as error:
                failure = error
            _forget_locals(failure)
            result.passes.append((len(rows), _count_tokens(rows), failure))
            if not self._executor.answers():
                raise DeviceLostError(
                    f"the device has stopped computing ({error_text(failure)}): load the engine again, in a new process"
                ) from failure
            full = is_out_of_memory(failure)
            if full:
                self._lower_limit(_count_tokens(rows))
            if not tries or (full and _count_tokens(rows) > 1):
                break
        if full and _count_tokens(rows) > 1:
            halves = list(_split_rows(_order_by_reads(rows), -(-_count_tokens(rows) // 2)))
        elif len(rows) > 1:
            ordered, middle = _order_by_reads(rows), len(rows) // 2
            halves = [ordered[:middle], ordered[middle:]]
        else:
            self._give_up(rows, _no_memory_error(failure) if full else failure, result)
            return
        for half in halves:
            # A row that fails alone is tried twice: the failure may be transient.
            self._attempt(half, _arrivals_read_by(half, arrivals), result, tries=2 if len(half) == 1 else 1)

    def _give_up(self, rows: Sequence[Row], failure: Exception, result: StepResult) -> None:
        """Mark a row, the only one left, as failed."""
        result.failed |= {row.number: failure for row in rows}
        if isinstance(failure, CapacityError):
            # Even one token ran out of memory: its view is too large, which is no reason to keep other steps small.
            self._most, self._cautious = self._before

    def _bring(self, arrival: Arrival, result: StepResult) -> None:
        """Bring KV that no row of the run read; on failure it stays absent."""
        try:
            self._executor.run(make_step([], [arrival]), {})
        except Exception as error:
            _forget_locals(error)
            result.passes.append((0, 0, error))

    def _lower_limit(self, tokens: int) -> None:
        self._executor.free_cached()
        half = max(1, tokens // 2)
        self._most, self._cautious = half if self._most is None else min(self._most, half), 0

    def _raise_limit(self) -> None:
        if self._most is None:
            return
        self._cautious += 1
        if self._cautious >= _CAUTIOUS_STEPS:
            self._most, self._cautious = self._most * 2, 0
            if self._most > 1 << 20:
                self._most = None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or any of its causes, means that the device or host ran out of memory."""
    causes: list[BaseException] = [error]
    for cause in causes:
        text = error_text(cause).lower()
        matches = isinstance(cause, RuntimeError) and ("out of memory" in text or "allocate memory" in text)
        if matches or isinstance(cause, MemoryError | torch.OutOfMemoryError):
            return True
        if cause.__cause__ is not None and not any(cause.__cause__ is earlier for earlier in causes):
            causes.append(cause.__cause__)
    return False


def _forget_locals(failure: BaseException) -> None:
    """Clear the frames of a failed pass: its error would keep all their tensors alive.

    The retry needs that memory, and whoever gets the error must not find other calls' tokens in it.
    """
    errors: list[BaseException | None] = [failure]
    for error in errors:
        if error is not None:
            traceback.clear_frames(error.__traceback__)
            errors += [cause for cause in (error.__cause__, error.__context__) if cause not in errors]


def _no_memory_error(cause: Exception) -> CapacityError:
    error = CapacityError(
        f"the device is out of memory for a step of one token: {error_text(cause)}. Release messages, lower "
        "kv_budget_bytes, or try again when other requests have finished"
    )
    error.__cause__ = cause
    return error


def _order_by_reads(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in an order in which each follows those of the step that it reads."""
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


def _count_tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) for row in rows)


def _split_rows(rows: Sequence[Row], most: int) -> Iterator[list[Row]]:
    """Yield the rows in passes of at most `most` tokens, cutting rows that are longer."""
    part: list[Row] = []
    room = most
    for row in rows:
        tail = row
        while len(tail.tokens) > room:
            if room:
                part.append(tail._replace(tokens=tail.tokens[:room], samples=False))
                tail = tail._replace(tokens=tail.tokens[room:], first=tail.first + room)
            yield part
            part, room = [], most
        part.append(tail)
        room -= len(tail.tokens)
    if part:
        yield part


def _arrivals_read_by(rows: Sequence[Row], arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the arrivals that these rows read and that are not in the pool yet."""
    read = {piece.segment for row in rows for piece in row.view}
    return [arrival for arrival in arrivals if arrival.segment in read and not arrival.is_there]


class Executor:
    """Runs steps with the model, the pool's tensors and the attention backend; decides nothing.

    Args:
        adapter: The model.
        pool: Pool that holds KV.
        backend: Attention backend.
        counters: Counts the KV read.
        loras: Adapters by fingerprint, and `mappers` likewise; both may grow.
        graphs: Whether recurring passes may be captured, on devices that can.
        ahead: Whether captured passes may start a step ahead.
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
        self._batch = BatchSampler(draw_kernel_on(adapter.device))
        self._masks = StepMasks(adapter.device)
        is_cuda = adapter.device.type == "cuda"
        self.passes = Passes(adapter, pool, backend, cuda_capture(adapter.device) if graphs and is_cuda else None)
        self.forward = Forward(adapter, pool, backend, counters, self.passes, loras, ahead=ahead)
        self._mappers = mappers

    def run(self, step: Step, samplers: Samplers) -> dict[int, SampledToken]:
        """Encode the step's tokens and return each sampling request's next token.

        Args:
            step: Step to run.
            samplers: Samplers by request number, for every row that samples.
        """
        with LayeredCopy(self.pool, step.arrivals) as arriving:
            for row in step.mapped:
                self._map(row, arriving.wait)
            if not step.tokens:
                return {}
            numbers = [row.number for row in step.rows if row.samples]
            row_samplers = [samplers[number] for number in numbers]
            with self._masks.fill_during(sampler.constraint for sampler in row_samplers):
                logits = self.forward.logits(step, arriving.wait)
            meanwhile = self.forward.meanwhile
            if meanwhile is not None:
                logits = logits.clone()  # the next pass overwrites this one's logits
            return dict(zip(numbers, choose_tokens(row_samplers, logits, self._batch, meanwhile), strict=True))

    def answers(self) -> bool:
        """Return whether the device still computes; checked after a failure."""
        if self.adapter.device.type == "cpu":
            return True
        try:
            return float(torch.ones(1, device=self.adapter.device).add_(1)) == 2.0
        except torch.OutOfMemoryError:
            return True
        except RuntimeError:
            return False

    def free_cached(self) -> None:
        """Return to the device what torch has cached and what recurring passes keep."""
        self.forward.forget()
        if self.adapter.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _map(self, row: Row, wait: Wait) -> None:
        """Fill a row's slots with the KV that a mapper computes from its only piece."""
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


def draw_kernel_on(device: torch.device) -> DrawKernel | None:
    """Return the kernel that draws tokens on a device: in Triton on a GPU, in C on a CPU; None if there is none."""
    kernel, kernels = DrawKernel.on(device), available_kernels()
    if kernel is not None or device.type != "cpu" or isinstance(kernels, str):
        return kernel
    return native_draw_kernel(kernels[0])


def native_draw_kernel(kernels: Kernels) -> DrawKernel:
    """Return the kernel in C that draws tokens from logits in fp32."""

    def launch(logits: Tensor, queries: Tensor, results: Tensor) -> None:
        drawing = DrawingStruct(
            logits=logits.data_ptr(),
            asked=queries.data_ptr(),
            told=results.data_ptr(),
            row=logits.stride(0),
            draws=len(queries),
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

    return DrawKernel(launch, (torch.float32,))


class Forward:
    """Runs the forward passes of steps, some of them before their step is planned.

        step t      pass ── winners of its rows, guessed by the GPU ── step t+1's pass, started ── wait ── account
        step t+1    logits of that pass, for every row that continues with the guess ───────────── ...

    Before the host knows the tokens of step t, the device starts step t+1 with the tokens that it drew itself. A row
    that continues with another token, has a new view, or is new is computed as usual. A row that has ended wrote its KV
    only where its own segment would have had it anyway.

    Args:
        adapter: The model.
        pool: Pool that holds KV.
        backend: Attention backend.
        counters: Counts the KV read.
        passes: Recurring passes.
        loras: Adapters by fingerprint.
        ahead: Whether captured passes start a step ahead; may be changed between steps.
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
        """True after a pass could not be started ahead: none is tried again until memory is freed."""
        self._last: _LastAttention | None = None
        self._ahead: _AheadPass | None = None
        self._next: tuple[Step, _LastAttention] | None = None
        """The current step, if the one after it may be started."""
        self.steps_ahead = 0
        """Number of steps whose logits, for some rows at least, were ready when they were needed."""

    def logits(self, step: Step, wait: Wait) -> Tensor:
        """Return the logits that the step's rows sample from: [rows that sample, vocabulary].

        Args:
            step: A step that has tokens.
            wait: Blocks until a layer of the arriving KV is in the pool.
        """
        ahead, self._ahead, self._next = self._ahead, None, None
        places = {} if ahead is None else ahead.places(step.rows)
        if ahead is None or not places:
            return self._run(step, wait)
        if not self._passes.are_current():  # it was started with weights that have been replaced since
            self.forget()
            return self._run(step, wait)
        self.steps_ahead += 1
        self._count(ahead.last.attention, ahead.step.rows, {row.tenant for row in step.rows})
        new_rows = [row for row in step.rows if row.number not in places]
        indices = [places[row.number] for row in step.rows if row.samples and row.number in places]
        is_all = indices == list(range(len(ahead.step.rows)))
        logits = ahead.logits if is_all else ahead.logits[indices]
        if not new_rows:
            if step.layout is ahead.last.layout and step.further == ahead.last.further:  # started for it
                self._last = ahead.last._replace(is_ahead=False)
                self._look_ahead(step, self._last)
            return logits
        part = make_step(new_rows, step.arrivals)
        if not part.tokens:
            return logits
        if not part.logits_at:
            logits = logits.clone() if is_all else logits
            self._run(part, wait)
            return logits
        return self._merge_logits(step, part, places, logits.clone() if is_all else logits, wait)

    def _merge_logits(self, step: Step, part: Step, places: Mapping[int, int], logits: Tensor, wait: Wait) -> Tensor:
        """Merge logits that are known with those of the part that must be computed, in the order of the step."""
        computed = self._run(part, wait)
        self._next = None
        of_known, of_part = iter(range(len(logits))), iter(range(len(logits), len(logits) + len(computed)))
        order = [next(of_known if row.number in places else of_part) for row in step.rows if row.samples]
        return torch.cat((logits, computed))[order]

    @property
    def meanwhile(self) -> Callable[[DrawnTokens], None] | None:
        """Callback that starts the next step with the tokens that this one will almost surely sample, while the device
        computes. None if that is not possible. It overwrites what `logits` returned."""
        return None if self._next is None else self._begin

    def _begin(self, drawn: DrawnTokens) -> None:
        assert self._next is not None
        (step, last), self._next, self._last = self._next, None, None
        assert last.recurring is not None
        try:
            if not last.attention.follow():
                return
            positions = [at + 1 for at in step.positions]
            logits = last.recurring.logits(drawn.guesses, positions, last.attention, step.logits_at)
        except Exception as error:  # the step itself has not failed: a persistent fault will show in the next pass
            self._is_refused = True
            _log.warning("a step could not be started ahead: %s", error_text(error))
            return
        self._last = last._replace(further=last.further + 1, is_ahead=True)
        self._ahead = _AheadPass(step, drawn, self._last, logits)

    def _look_ahead(self, step: Step, last: _LastAttention) -> None:
        is_captured = last.recurring is not None and last.recurring.is_captured
        may = self.goes_ahead and not self._is_refused and is_captured
        if may and step.further < step.room and len(step.logits_at) == len(step.rows):
            self._next = step, last

    def _run(self, step: Step, wait: Wait) -> Tensor:
        """Run the pass of a step."""
        adapted = self._adapted(step)
        last = self._attention(step, wait)
        if last.recurring is None:
            logits = self._adapter.logits(step.tokens, step.positions, last.attention, step.logits_at, adapted=adapted)
        else:
            logits = self._passes.logits(last.recurring, step.tokens, step.positions, last.attention, step.logits_at)
            self._look_ahead(step, last)
        self._count(last.attention, step.rows)  # while a device computes
        return logits

    def _count(self, attention: StepAttention, rows: Sequence[Row], tenants: Container[str] | None = None) -> None:
        """Count the KV that rows read: those of some tenants, or of all."""
        readers = [row.tenant for row in rows if not row.mapper for _ in row.tokens]
        for tenant, (shared, alone) in attention.kv_bytes_read(readers).items():
            if tenants is not None and tenant not in tenants:
                continue  # it has left
            self._counters.add(tenant, "kv_bytes_read", shared)
            self._counters.add(tenant, "kv_bytes_unshared", alone)

    def _attention(self, step: Step, wait: Wait) -> _LastAttention:
        """Return the step's attention, with its pass if its sizes recur. Reuse the last step's where it can advance by
        one token."""
        last, self._last = self._last, None
        if last is not None and step.further and last.layout is step.layout:
            is_there = last.is_ahead and last.further == step.further
            if is_there or (not last.is_ahead and last.further + 1 == step.further and last.attention.follow()):
                self._last = last._replace(further=step.further, is_ahead=False)
                return self._last
        layout = step.layout.grown(step.further)
        alike = None if step.arrivals or step.adapted else self._passes.find(layout, len(step.logits_at))
        if alike is None:
            attention = StepAttention(layout, self._pool, self._backend, self._adapter.kinds, wait)
            current = _LastAttention(step.layout, step.further, attention, None)
        else:
            current = _LastAttention(step.layout, step.further, alike[1], alike[0])
        if layout.own and not step.arrivals:
            self._last = current
        return current

    def _adapted(self, step: Step) -> list[Adapted]:
        """Return the step's tokens by the adapter that serves them."""
        adapted: list[Adapted] = []
        for key, tokens in step.adapted.items():
            rows = None
            if len(tokens) < len(step.tokens):
                rows = SentTables({"rows": numpy.array(tokens, dtype=numpy.int64)}, self._adapter.device)["rows"]
            adapted.append((self._loras[key], rows))
        return adapted

    def forget(self) -> None:
        """Drop all state kept for the next step."""
        self._last = self._ahead = self._next = None
        self._is_refused = False
        self._passes.forget()


class _LastAttention(NamedTuple):
    """Attention of the last step, from which the next one's may be derived."""

    layout: Layout
    further: int
    """Number of decode steps since the layout was made."""
    attention: StepAttention
    recurring: FixedPass | None
    is_ahead: bool = False
    """True if the attention is that of a pass started ahead, whose step has not been planned yet."""


class _AheadPass(NamedTuple):
    """A pass that was started before its step was planned."""

    step: Step
    """The step before it, with the same rows."""
    drawn: DrawnTokens
    """Guesses of the tokens that those rows sampled."""
    last: _LastAttention
    logits: Tensor
    """Logits [rows, vocabulary], valid until the next pass."""

    def places(self, rows: Sequence[Row]) -> dict[int, int]:
        """Return the indices, by request number, of the rows that it has already computed."""
        guesses = self.drawn.guessed()
        before = {row.number: (place, row) for place, row in enumerate(self.step.rows)}
        place_of: dict[int, int] = {}
        for row in rows:
            place, old = before.get(row.number, (0, None))
            if old is None or row.segment is not old.segment or row.view is not old.view or row.mapper or row.adapter:
                continue
            if row.first == old.first + 1 and row.tokens == (guesses[place],):
                place_of[row.number] = place
        return place_of
