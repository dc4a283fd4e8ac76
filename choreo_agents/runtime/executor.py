"""Runs a step: maps KV, does one forward pass, samples a token for every row that samples, and retries failures."""

from __future__ import annotations

import ctypes
import logging
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
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
_UNLIMITED = 1 << 20
"""Tokens of a pass that no step exceeds."""
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

    def drop_failed(self, part: Sequence[Row]) -> Sequence[Row]:
        """Return those of some rows that can run, and mark the others as failed: they, or rows of this step that they
        read, have failed."""
        if not self.failed:
            return part
        lost = {row.segment: self.failed[row.number] for row in self.rows if row.number in self.failed}
        for row in part:
            unread = [lost[p.segment] for p in row.view if p.segment in lost and p.first + p.count > p.segment.encoded]
            if unread:
                lost[row.segment] = self.failed.setdefault(row.number, unread[0])
        return [row for row in part if row.number not in self.failed]


class StepRetry:
    """Runs each step until every row has run or failed by itself.

        a pass fails     it is run once more: rewriting the same keys changes nothing, and samplers choose the same
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
        self._most = _UNLIMITED
        """Most tokens of a pass, less after a larger one ran out of memory."""
        self._cautious = 0
        """Steps since the limit was last changed."""

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
        limits = self._most, self._cautious
        parts = [rows]
        if self._most < _UNLIMITED and _count_tokens(rows) > self._most:
            parts = _split_rows(rows, self._most)
        while parts:
            part = result.drop_failed(parts.pop(0))
            failure = self._try(part, _arrivals_read_by(part, arrivals), result) if part else None
            if failure is None:
                continue
            tokens, is_full = _count_tokens(part), is_out_of_memory(failure)
            if is_full and tokens > 1:
                self._most, self._cautious = min(self._most, tokens // 2), 0
                parts = [*_split_rows(part, -(-tokens // 2)), *parts]
            elif len(part) > 1:
                ordered, middle = _order_by_reads(part), len(part) // 2
                parts = [ordered[:middle], ordered[middle:], *parts]
            else:
                result.failed[part[0].number] = _no_memory_error(failure) if is_full else failure
                if is_full:
                    # A view that is too large even for one token is no reason to keep other steps small.
                    self._most, self._cautious = limits
        unread = [arrival for arrival in arrivals if not arrival.is_there]
        if unread and self._try([], unread, result) is not None:
            for arrival in unread:
                self._try([], [arrival], result)
        self._cautious += 1
        if self._cautious >= _CAUTIOUS_STEPS:
            self._most, self._cautious = min(self._most * 2, _UNLIMITED), 0
        return result

    def _try(self, rows: Sequence[Row], arrivals: Sequence[Arrival], result: StepResult) -> Exception | None:
        """Run rows in one pass, and once more if it fails; return the error if both fail, or memory is short."""
        for _ in range(2):
            try:
                result.chosen |= self._executor.run(self._steps.make(rows, arrivals), result.samplers)
                return None
            except Exception as error:
                failure = error
            _forget_locals(failure)
            tokens = _count_tokens(rows)
            result.passes.append((len(rows), tokens, failure))
            if not self._executor.answers():
                raise DeviceLostError(
                    f"the device has stopped computing ({error_text(failure)}): load the engine again, in a new process"
                ) from failure
            if is_out_of_memory(failure):
                self._executor.free_cached()
                if tokens > 1:
                    break
        return failure


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
    by_segment = {row.segment: row for row in rows}
    order = TopologicalSorter[Segment]()
    for row in rows:
        read = [piece.segment for piece in row.view if piece.segment is not row.segment]
        order.add(row.segment, *(segment for segment in read if segment in by_segment))
    return [by_segment[segment] for segment in order.static_order()]


def _count_tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) for row in rows)


def _split_rows(rows: Sequence[Row], most: int) -> list[Sequence[Row]]:
    """Split rows into passes of at most `most` tokens, each row after those that it reads; longer rows are cut."""
    parts: list[Sequence[Row]] = []
    part: list[Row] = []
    room = most
    for row in _order_by_reads(rows):
        tail = row
        while len(tail.tokens) > room:
            if room:
                part.append(tail._replace(tokens=tail.tokens[:room], samples=False))
                tail = tail._replace(tokens=tail.tokens[room:], first=tail.first + room)
            parts.append(part)
            part, room = [], most
        part.append(tail)
        room -= len(tail.tokens)
    return [*parts, part]


def _arrivals_read_by(rows: Sequence[Row], arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the arrivals that these rows read and that are not in the pool yet."""
    if not arrivals:
        return []
    read = {piece.segment for row in rows for piece in row.view}
    return [arrival for arrival in arrivals if arrival.segment in read and not arrival.is_there]


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


class Executor:
    """Runs steps with the model, the pool's tensors and the attention backend; decides nothing.

    Some forward passes run before their step is planned:

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
        self._loras, self._mappers = loras, mappers
        self._batch = BatchSampler(draw_kernel_on(adapter.device))
        self._masks = StepMasks(adapter.device)
        is_cuda = adapter.device.type == "cuda"
        self.passes = Passes(adapter, pool, backend, cuda_capture(adapter.device) if graphs and is_cuda else None)
        self._goes_ahead = ahead
        self._is_refused = False
        """True after a pass could not be started ahead: none is tried again until memory is freed."""
        self._last: _LastAttention | None = None
        self._ahead: _AheadPass | None = None
        self._next: tuple[Step, _LastAttention] | None = None
        """The current step, if the one after it may be started."""
        self.steps_ahead = 0
        """Number of steps whose logits, for some rows at least, were ready when they were needed."""

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
                logits = self.logits(step, arriving.wait)
            meanwhile = None if self._next is None else self._begin
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
        self._forget()
        if self.adapter.device.type == "cuda":
            torch.cuda.empty_cache()

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
        if not self.passes.are_current():  # it was started with weights that have been replaced since
            self._forget()
            return self._run(step, wait)
        self.steps_ahead += 1
        self._count(ahead.last.attention, ahead.step.rows, {row.tenant for row in step.rows})
        new_rows = [row for row in step.rows if row.number not in places]
        indices = [places[row.number] for row in step.rows if row.samples and row.number in places]
        is_all = indices == list(range(len(ahead.step.rows)))
        logits = ahead.logits if is_all else ahead.logits[indices]
        if not new_rows:
            if step.layout is ahead.last.layout and step.further == ahead.last.further:  # started for it
                self._last = ahead.last
                self._look_ahead(step, ahead.last)
            return logits
        part = make_step(new_rows, step.arrivals)
        if not part.tokens:
            return logits
        if is_all:
            logits = logits.clone()  # the part's pass overwrites it
        computed = self._run(part, wait)
        if not part.logits_at:
            return logits
        self._next = None
        of_known, of_part = iter(range(len(logits))), iter(range(len(logits), len(logits) + len(computed)))
        order = [next(of_known if row.number in places else of_part) for row in step.rows if row.samples]
        return torch.cat((logits, computed))[order]

    def _begin(self, drawn: DrawnTokens) -> None:
        """Start the next step with the tokens that this one will almost surely sample, while the device computes.

        It overwrites what `logits` returned.
        """
        assert self._next is not None
        (step, last), self._next, self._last = self._next, None, None
        assert last.recurring is not None
        try:
            if not last.attention.follow():
                return
            positions = [at + 1 for at in step.positions]
            logits = last.recurring.logits(drawn.guesses, positions, step.logits_at)
        except Exception as error:  # the step itself has not failed: a persistent fault will show in the next pass
            self._is_refused = True
            _log.warning("a step could not be started ahead: %s", error_text(error))
            return
        self._last = last._replace(further=last.further + 1)
        self._ahead = _AheadPass(step, drawn, self._last, logits)

    def _look_ahead(self, step: Step, last: _LastAttention) -> None:
        is_captured = last.recurring is not None and last.recurring.captured is not None
        may = self._goes_ahead and not self._is_refused and is_captured
        if may and step.further < step.room and len(step.logits_at) == len(step.rows):
            self._next = step, last

    def _run(self, step: Step, wait: Wait) -> Tensor:
        """Run the pass of a step."""
        adapted = self._adapted(step)
        last = self._attention(step, wait)
        if last.recurring is None:
            logits = self.adapter.logits(step.tokens, step.positions, last.attention, step.logits_at, adapted=adapted)
        else:
            logits = self.passes.logits(last.recurring, step.tokens, step.positions, step.logits_at)
            self._look_ahead(step, last)
        self._count(last.attention, step.rows)  # while a device computes
        return logits

    def _count(self, attention: StepAttention, rows: Sequence[Row], tenants: Container[str] | None = None) -> None:
        """Count the KV that rows read: those of some tenants, or of all."""
        readers = [row.tenant for row in rows if not row.mapper for _ in row.tokens]
        for tenant, (shared, alone) in attention.kv_bytes_read(readers).items():
            if tenants is not None and tenant not in tenants:
                continue  # it has left
            self.counters.add(tenant, "kv_bytes_read", shared)
            self.counters.add(tenant, "kv_bytes_unshared", alone)

    def _attention(self, step: Step, wait: Wait) -> _LastAttention:
        """Return the step's attention, with its pass if its sizes recur. Reuse the last step's where it can advance by
        one token."""
        last, self._last = self._last, None
        if last is not None and last.layout is step.layout:
            is_there = last.further == step.further  # a pass that was started ahead has advanced it
            if is_there or (last.further + 1 == step.further and last.attention.follow()):
                self._last = last._replace(further=step.further)
                return self._last
        layout = step.layout.grown(step.further)
        recurring = None if step.arrivals or step.adapted else self.passes.find(layout, len(step.logits_at))
        attention = None if recurring is None else recurring.attention
        if attention is None:
            attention = StepAttention(layout, self.pool, self.backend, self.adapter.kinds, wait)
        current = _LastAttention(step.layout, step.further, attention, recurring)
        if layout.own and not step.arrivals:
            self._last = current
        return current

    def _adapted(self, step: Step) -> list[Adapted]:
        """Return the step's tokens by the adapter that serves them."""
        adapted: list[Adapted] = []
        for key, tokens in step.adapted.items():
            rows = None
            if len(tokens) < len(step.tokens):
                rows = SentTables({"rows": numpy.array(tokens, dtype=numpy.int64)}, self.adapter.device)["rows"]
            adapted.append((self._loras[key], rows))
        return adapted

    def _forget(self) -> None:
        """Drop all state kept for the next step."""
        self._last = self._ahead = self._next = None
        self._is_refused = False
        self.passes.forget()

    @torch.inference_mode()
    def _map(self, row: Row, wait: Wait) -> None:
        """Fill a row's slots with the KV that a mapper computes from its only piece."""
        mapper, [piece] = self._mappers[row.mapper], row.view
        source = self.pool.slots(piece.segment, row.first, len(row.tokens))
        target = self.pool.slots(row.segment, row.first, len(row.tokens))
        first = row.segment.native_offset + row.first
        positions = torch.arange(first, first + len(row.tokens), device=source.device)
        for layer, (keys, values) in enumerate(zip(self.pool.keys, self.pool.values, strict=True)):
            wait(layer)
            moved = mapper.moved(layer, keys[:, source], piece.shift)
            keys[:, target], values[:, target] = mapper.map(layer, moved, values[:, source], positions)


class _LastAttention(NamedTuple):
    """Attention of the last step, from which the next one's may be derived."""

    layout: Layout
    further: int
    """Number of decode steps since the layout was made."""
    attention: StepAttention
    recurring: FixedPass | None


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
