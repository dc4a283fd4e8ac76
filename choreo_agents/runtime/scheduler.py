"""Decides what the next step does. No tensors, no clocks, no side effects: numbers in, a plan out.

Another policy is another object with `plan`, given to `Engine.load(scheduling=Scheduling(policy=...))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from choreo_agents.errors import InvalidRequestError


@dataclass(frozen=True)
class Limits:
    """Bounds of one step."""

    max_batched_tokens: int = 512
    """Tokens encoded in one step at most, and so requests too: each gets at least one."""
    max_num_seqs: int = 256
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
    priority: int = 0
    tenant: str = ""
    """Whose it is: a name that does not tell the salt."""


class Running(NamedTuple):
    """An admitted request."""

    number: int
    pending: int
    """Tokens to encode: 1 while it decodes."""
    priority: int = 0
    tenant: str = ""
    """As of those that wait."""


@dataclass(frozen=True)
class Plan:
    """What the next step does."""

    admitted: tuple[int, ...]
    """Of those that wait, who is given memory, in this order. Who finds no room after all waits on."""
    stuck: tuple[int, ...]
    """Cannot be admitted, and nothing is running that would give memory back: they fail."""
    chunks: tuple[tuple[int, int], ...]
    """(request, tokens to encode), each at least 1, of those that run or are admitted. Who is left out pauses."""


class SchedulingPolicy(Protocol):
    """Says what each step does. Called by one engine's thread, under its lock: it must be quick, and touch nothing."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_tokens: int, limits: Limits) -> Plan:
        """The next step.

        Args:
            waiting: In the order of the queue: first come first served within a priority.
            running: In order of admission. There are no more than `limits.rows`.
            free_tokens: KV room that is free or can be evicted.
            limits: Bounds of a step, which the plan must keep.
        """
        ...


class FirstComeFirstServed:
    """The policy of an engine that is given no other: admit first come first served while memory lasts, then share the
    step's tokens.

    Every admitted request gets a token of each step, so that neither decodes nor prefills starve; what is left goes to
    prefills in order, the last one perhaps in part. A ready request that does not fit keeps later ones from overtaking
    it, unless nothing runs: then one that fits may go first, since it gives memory back when it ends. What is left of a
    step after that goes to requests that follow on what the step encodes to its end.
    """

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_tokens: int, limits: Limits) -> Plan:
        """See `SchedulingPolicy`."""
        admitted: list[Waiting] = []
        blocked: Waiting | None = None
        for request in waiting:
            if len(running) + len(admitted) >= min(limits.max_num_seqs, limits.max_batched_tokens):
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
        left = limits.max_batched_tokens - len(active)
        assert left >= 0 and all(pending >= 1 for _, pending in active)
        chunks: list[tuple[int, int]] = []
        for number, pending in active:
            more = min(pending - 1, left)
            chunks.append((number, 1 + more))
            left -= more
        whole = {number for (number, count), (_, pending) in zip(chunks, active, strict=True) if count == pending}
        for request in waiting if blocked is None else ():
            if not request.ready and request.after and whole.issuperset(request.after):
                if not left or len(chunks) >= limits.max_num_seqs or request.room > free_tokens:
                    break
                free_tokens -= request.room
                admitted.append(request)
                count = min(request.pending, left)
                chunks.append((request.number, count))
                left -= count
                if count == request.pending:
                    whole.add(request.number)
        return Plan(tuple(r.number for r in admitted), stuck, tuple(chunks))


def require_sound(plan: Plan, waiting: Sequence[Waiting], running: Sequence[Running], limits: Limits) -> None:
    """Raise `InvalidRequestError` unless a step of these requests can be made as planned, within its bounds."""
    if not isinstance(plan, Plan):
        raise InvalidRequestError(f"a scheduling policy must return a Plan, not {plan!r}")
    known, served = {each.number for each in waiting}, {each.number for each in running}.union(plan.admitted)
    began, counts = (*plan.admitted, *plan.stuck), [count for _, count in plan.chunks]
    wrong = (
        (len(set(began)) < len(began), f"admits or gives up a request twice: {began}"),
        (not known.issuperset(began), f"admits or gives up requests that do not wait: {sorted({*began} - known)}"),
        (len(dict(plan.chunks)) < len(counts), f"serves a request twice: {plan.chunks}"),
        (not served.issuperset(dict(plan.chunks)), f"serves requests that do not run: {plan.chunks}"),
        (min(counts, default=1) < 1, f"gives a request no token: {plan.chunks}"),
        (
            sum(counts) > limits.max_batched_tokens,
            f"encodes {sum(counts)} tokens, at most {limits.max_batched_tokens} fit a step",
        ),
        (len(served) > limits.max_num_seqs, f"serves {len(served)} requests, at most {limits.max_num_seqs} may run"),
    )
    for is_so, complaint in wrong:
        if is_so:
            raise InvalidRequestError(f"the scheduling policy's plan {complaint}")
