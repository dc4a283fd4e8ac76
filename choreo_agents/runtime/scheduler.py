"""Decides what the next step does. No tensors, no clocks, no side effects: numbers in, a plan out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Limits:
    """Bounds of one step."""

    step_tokens: int = 512
    """Tokens encoded in one step at most, and so requests too: each gets at least one."""
    rows: int = 256
    """Requests served at once at most."""


@dataclass(frozen=True)
class Waiting:
    """A request that holds no memory yet."""

    number: int
    room: int
    """Tokens of KV memory that it needs to be admitted, rounded to blocks."""
    ready: bool = True
    """False while another request encodes what it could reuse; it is then passed over."""
    pending: int = 1
    """Tokens it will have to encode before its first sample."""
    after: tuple[int, ...] = ()
    """If it is not ready: the requests that encode what it waits for, if that is all that it waits for. It may run in
    the step that ends them, since a step writes all keys of a layer before it attends there."""


@dataclass(frozen=True)
class Running:
    """An admitted request."""

    number: int
    pending: int
    """Tokens to encode: 1 while it decodes."""


@dataclass(frozen=True)
class Plan:
    """What the next step does."""

    admitted: tuple[int, ...]
    stuck: tuple[int, ...]
    """Cannot be admitted, and nothing is running that would give memory back."""
    chunks: tuple[tuple[int, int], ...]
    """(request, tokens to encode), each at least 1."""


MOST_OVERTAKEN = 64
"""How many requests of a higher priority may be put before one that came earlier: so that none starves."""


class Queued(Protocol):
    """What decides a request's place in the queue."""

    @property
    def priority(self) -> int: ...

    @property
    def overtaken(self) -> int: ...


def place_in_queue(queue: Sequence[Queued], priority: int, most: int = MOST_OVERTAKEN) -> int:
    """Where a new request goes: behind all of its priority or a higher one, and whoever was overtaken often enough."""
    at = len(queue)
    while at and queue[at - 1].priority < priority and queue[at - 1].overtaken < most:
        at -= 1
    return at


def plan_step(waiting: Sequence[Waiting], running: Sequence[Running], free_tokens: int, limits: Limits) -> Plan:
    """Admit first come first served while memory lasts, then share the step's tokens.

    Every admitted request gets a token of each step, so that neither decodes nor prefills starve; what is left goes to
    prefills in order, the last one perhaps in part. A ready request that does not fit keeps later ones from overtaking
    it, unless nothing runs: then one that fits may go first, since it gives memory back when it ends. What is left of a
    step after that goes to requests that follow on what the step encodes to its end.

    Args:
        waiting: In the order of the queue.
        running: In order of admission.
        free_tokens: KV room that is free or can be evicted.
        limits: Bounds of a step.
    """
    admitted: list[Waiting] = []
    blocked: Waiting | None = None
    for request in waiting:
        if len(running) + len(admitted) >= min(limits.rows, limits.step_tokens):
            break
        if not request.ready:
            continue
        if request.room <= free_tokens:
            free_tokens -= request.room
            admitted.append(request)
            if blocked is not None:
                break
        else:
            blocked = blocked or request
            if running or admitted:
                break
    stuck = (blocked.number,) if blocked is not None and not running and not admitted else ()
    active = [(r.number, r.pending) for r in running] + [(r.number, r.pending) for r in admitted]
    left = limits.step_tokens - len(active)
    assert left >= 0 and all(pending >= 1 for _, pending in active)
    chunks: list[tuple[int, int]] = []
    for number, pending in active:
        more = min(pending - 1, left)
        chunks.append((number, 1 + more))
        left -= more
    whole = {number for (number, count), (_, pending) in zip(chunks, active, strict=True) if count == pending}
    for request in waiting if blocked is None else ():
        if not request.ready and request.after and whole.issuperset(request.after):
            if not left or len(chunks) >= limits.rows or request.room > free_tokens:
                break
            free_tokens -= request.room
            admitted.append(request)
            count = min(request.pending, left)
            chunks.append((request.number, count))
            left -= count
            if count == request.pending:
                whole.add(request.number)
    return Plan(tuple(r.number for r in admitted), stuck, tuple(chunks))
