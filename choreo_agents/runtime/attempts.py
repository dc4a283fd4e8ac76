"""Runs steps so that a failure is that of the calls that cause it, and of no other."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from choreo_agents.errors import CapacityError, DeviceLostError, told
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.executor import Executor
from choreo_agents.runtime.step import Row, StepMaker, make_step
from choreo_agents.sampling import Chosen, Sampler

_CAUTIOUS_STEPS = 64
"""After the device ran out of memory, steps until a larger one is tried."""
Samplers = Mapping[int, Sampler]


@dataclass
class Ran:
    """What came of a step."""

    rows: Sequence[Row]
    """That it had."""
    samplers: Samplers
    """By request number, for every row that samples."""
    chosen: dict[int, Chosen] = field(default_factory=dict)
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


class Attempts:
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

    def run(self, rows: Sequence[Row], arrivals: Sequence[Arrival], samplers: Samplers) -> Ran:
        """Run a step's rows.

        Args:
            rows: What to encode.
            arrivals: What the step brings into the pool. Those that do not get there stay undone.
            samplers: By request number, for every row that samples.

        Raises:
            DeviceLostError: The device computes no more.
        """
        ran = Ran(rows, samplers)
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

    def _attempt(self, part: Sequence[Row], arrivals: Sequence[Arrival], ran: Ran, tries: int) -> None:
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
                    f"the device computes no more ({told(failure)}): load the engine again, in a new process"
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

    def _give_up(self, rows: Sequence[Row], failure: Exception, ran: Ran) -> None:
        """Who stands alone has failed, at most one."""
        ran.failed |= {row.number: failure for row in rows}
        if isinstance(failure, CapacityError):
            # A token alone: it is what it reads that is too much, and no reason for others' steps to be small.
            self._most, self._cautious = self._before

    def _bring(self, arrival: Arrival, ran: Ran) -> None:
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
        said = told(each).lower()
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
        f"the device has no memory left for a step of one token: {told(cause)}. Release messages, give the engine a "
        "smaller kv_budget_bytes, or try again when others have ended"
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
