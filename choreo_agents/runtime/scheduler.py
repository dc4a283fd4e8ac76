"""Scheduling policies: plan the next step from numbers alone, without tensors, clocks or side effects.

A policy is any object with `plan`, passed to `Engine.load(scheduling=Scheduling(policy=...))`.
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
    """Most tokens encoded in one step, and so requests too: each gets at least one."""
    max_num_seqs: int = 256
    """Most requests served at once."""


@dataclass(frozen=True)
class Waiting:
    """A request that holds no memory yet."""

    number: int
    room: int
    """Tokens of KV memory that it needs to be admitted, rounded up to blocks."""
    ready: bool = True
    """Whether it may be admitted; False while another request encodes what it could reuse: it is then passed over."""
    pending: int = 1
    """Tokens it will have to encode before its first sample."""
    after: tuple[int, ...] = ()
    """If it is not ready: the requests that encode what it waits for, if it waits for nothing else. It may run in the
    step that ends them, since a step writes all keys of a layer before it attends there."""
    priority: int = 0
    tenant: str = ""
    """Tenant name, which does not reveal the salt."""


class Running(NamedTuple):
    """An admitted request."""

    number: int
    pending: int
    """Tokens to encode: 1 while it decodes."""
    priority: int = 0
    tenant: str = ""
    """Tenant name, as in `Waiting`."""


@dataclass(frozen=True)
class Plan:
    """Plan of the next step."""

    admitted: tuple[int, ...]
    """Waiting requests that get memory, in this order. Those that do not fit after all wait on."""
    stuck: tuple[int, ...]
    """Waiting requests that cannot be admitted although nothing runs that would free memory: they fail."""
    chunks: tuple[tuple[int, int], ...]
    """Pairs of a running or admitted request and its tokens to encode, at least 1. Requests left out pause."""


class SchedulingPolicy(Protocol):
    """Plans each step. Called on the engine's thread, under its lock: it must be quick and have no side effects."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_tokens: int, limits: Limits) -> Plan:
        """Return the plan of the next step.

        Args:
            waiting: In the order of the queue: first come first served within a priority.
            running: In order of admission; at most `limits.max_num_seqs`.
            free_tokens: Tokens of KV memory that are free or can be evicted.
            limits: Bounds that the plan must keep.
        """
        ...


class FirstComeFirstServed:
    """The default policy: admit first come first served while memory lasts, then share the step's tokens.

    Every admitted request gets a token of each step, so that neither decodes nor prefills starve; the remaining tokens
    go to prefills in order, the last one perhaps in part. A ready request that does not fit keeps later ones from
    overtaking it, unless nothing runs: then one that fits may go first, since it frees memory when it ends. Tokens that
    remain go to requests that follow on what the step encodes to its end.
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
        tokens_left = limits.max_batched_tokens - len(active)
        assert tokens_left >= 0 and all(pending >= 1 for _, pending in active)
        chunks: list[tuple[int, int]] = []
        for number, pending in active:
            more = min(pending - 1, tokens_left)
            chunks.append((number, 1 + more))
            tokens_left -= more
        whole = {number for (number, count), (_, pending) in zip(chunks, active, strict=True) if count == pending}
        for request in waiting if blocked is None else ():
            if not request.ready and request.after and whole.issuperset(request.after):
                if not tokens_left or len(chunks) >= limits.max_num_seqs or request.room > free_tokens:
                    break
                free_tokens -= request.room
                admitted.append(request)
                count = min(request.pending, tokens_left)
                chunks.append((request.number, count))
                tokens_left -= count
                if count == request.pending:
                    whole.add(request.number)
        return Plan(tuple(r.number for r in admitted), stuck, tuple(chunks))


def require_sound(plan: Plan, waiting: Sequence[Waiting], running: Sequence[Running], limits: Limits) -> None:
    """Raise `InvalidRequestError` unless a plan can be run with these requests, within the limits."""
    if not isinstance(plan, Plan):
        raise InvalidRequestError(f"a scheduling policy must return a Plan, not {plan!r}")
    queued, served = {r.number for r in waiting}, {r.number for r in running}.union(plan.admitted)
    began, counts = (*plan.admitted, *plan.stuck), [count for _, count in plan.chunks]
    wrong = (
        (len(set(began)) < len(began), f"admits or rejects a request twice: {began}"),
        (not queued.issuperset(began), f"admits or rejects requests that are not waiting: {sorted({*began} - queued)}"),
        (len(dict(plan.chunks)) < len(counts), f"serves a request twice: {plan.chunks}"),
        (not served.issuperset(dict(plan.chunks)), f"serves requests that are not running: {plan.chunks}"),
        (min(counts, default=1) < 1, f"gives a request no token: {plan.chunks}"),
        (
            sum(counts) > limits.max_batched_tokens,
            f"encodes {sum(counts)} tokens, more than max_batched_tokens={limits.max_batched_tokens}",
        ),
        (len(served) > limits.max_num_seqs, f"serves {len(served)} requests, max_num_seqs is {limits.max_num_seqs}"),
    )
    for is_so, complaint in wrong:
        if is_so:
            raise InvalidRequestError(f"the scheduling policy's plan {complaint}")
