"""The logits that a step samples from: computed for it, or one step ahead.

    step t      pass ── winners of its rows, as a GPU guesses them ── step t+1's pass, begun ── wait ── account
    step t+1    logits of that pass, for every row that goes on with what was guessed ───────── ...

Before the host knows what step t has said, the device computes the step after it: with the tokens that it has drawn
itself. Who then goes on with another token, sees something new, or comes, is computed as if nothing had been; who has
ended has written what it said where it would have been written anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from choreo_agents.attention.backends.base import AttentionBackend
from choreo_agents.attention.layout import Layout
from choreo_agents.attention.packing import SentTables
from choreo_agents.attention.step import StepAttention
from choreo_agents.errors import told
from choreo_agents.kv.pool import KVPool
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.lora import Adapted, LoraAdapter
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.passes import FixedPass, Passes
from choreo_agents.runtime.step import Row, Step, make_step
from choreo_agents.sampling import Tickets
from choreo_agents.tracing import Ledger

Wait = Callable[[int], None]
_log = logging.getLogger(__name__)


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

    def is_followed_by(self, step: Step) -> bool:
        """Whether a step is the one that it was made for, but for what rows say."""
        return step.layout is self.last.layout and step.further == self.last.further


class Forward:
    """Runs the passes of an engine's steps.

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
        counters: Ledger[Counters],
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
            if ahead.is_followed_by(step):
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
            _log.warning("a step could not be begun ahead: %s", told(error))
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
            self._counters.add(tenant, "kv_bytes_read_alone", alone)

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
