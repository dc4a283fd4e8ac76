"""Faults to inject into an engine: functions of ours that fail at some call, steps that the device fails, and logits
that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from choreo_agents import Engine
from choreo_agents.engine.messages.message import MessageIds, Usage
from choreo_agents.engine.messages.table import FromCache, MessageTable
from choreo_agents.engine.request_builder import PlacedCall
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.store import KVStore
from choreo_agents.kv.store.spill import SpillFile
from choreo_agents.models.constraints.masks import StepMasks
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.step import Step
from choreo_agents.sampling import BatchSampler, TokenSampler

AT_THE_END: dict[str, tuple[type, str]] = {
    "the message is named": (MessageIds, "handle"),
    "its cost is told": (Usage, "of"),
    "its encoding is closed": (FromCache, "close"),
    "its parents are unpinned": (FromCache, "unpin"),
    "the pool completes it": (KVPool, "complete"),
    "it is filled": (MessageTable, "fill"),
    "the cache holds it": (KVCache, "hold"),
    "it is labelled": (PlacedCall, "put_on"),
    "it is leased": (MessageTable, "lease"),
    "it is memoised": (MessageTable, "remember"),
    "it is kept or not": (MessageTable, "drop_if_unleased"),
    "it is finished": (PlacedCall, "finish"),
    "it is forgotten": (PlacedCall, "_forget"),
    "its token is taken": (Request, "take"),
    "it is charged": (Request, "advance"),
}
"""What is done at the end of a call."""
BEFORE: dict[str, tuple[type, str]] = {
    "what it reads is asked for": (FromCache, "first"),
    "it is asked whether it is ready": (FromCache, "ready"),
    "what it reads is pinned": (FromCache, "pin"),
    "what it reads is bound": (FromCache, "bind"),
    "its room is evicted": (KVCache, "evict"),
    "it is brought back": (KVCache, "restore"),
    "its room is allocated": (KVPool, "allocate"),
    "a layer is copied": (KVPool, "fill"),
    "it is computed again": (MessageTable, "computed"),
    "it is filled again": (KVCache, "refill"),
    "its file is read": (SpillFile, "read"),
    "its file is written": (SpillFile, "write"),
    "a file that lasts is read": (KVStore, "load"),
    "a file that lasts is written": (KVStore, "save"),
}
"""What is done before, and on the way."""
DRAWING: dict[str, tuple[type, str]] = {
    "what a constraint allows is filled in": (StepMasks, "fill_during"),
    "a sampler sees its logits": (TokenSampler, "show"),
    "a sampler says what it draws": (TokenSampler, "draw"),
    "a constraint refuses": (TokenSampler, "refuses"),
    "tokens are drawn": (BatchSampler, "draw"),
    "a sampler goes on": (TokenSampler, "take"),
    "a call is withdrawn": (TokenSampler, "withdraw"),
}
"""What draws a token."""
NO_NUMBERS = (float("nan"), float("-inf"), float("inf"))


class InjectedError(Exception):
    """What a fault raises."""


@contextmanager
def failing_once(
    owner: type, name: str, *, at: int = 0, after: bool = False, tenant: str | None = None
) -> Iterator[list[str]]:
    """Let one call of a method fail: the one with this number, before or after it has done its work.

    Yields what has failed so far.

    Args:
        owner: Whose method it is, and `name` which.
        at: Calls that do not fail before.
        after: Whether it does its work.
        tenant: Of a request's methods, whose requests alone count.
    """
    held, calls = owner.__dict__[name], [0]
    failed: list[str] = []
    work = held.__func__ if isinstance(held, classmethod) else held

    def broken(*args: Any, **options: Any) -> Any:
        if tenant is not None and isinstance(args[0], Request) and args[0].tenant != tenant:
            return work(*args, **options)
        calls[0] += 1
        if calls[0] != at + 1:
            return work(*args, **options)
        failed.append(f"{owner.__name__}.{name}")
        if after:
            work(*args, **options)
        raise InjectedError(failed[-1])

    setattr(owner, name, classmethod(broken) if isinstance(held, classmethod) else broken)
    try:
        yield failed
    finally:
        setattr(owner, name, held)


@contextmanager
def failing_steps(engine: Engine, rng: Random, chance: float, most: int | None = None) -> Iterator[list[str]]:
    """Let passes fail by chance, before or after they are run, and all that are larger than so many tokens."""
    executor = engine._core.loop.executor
    run, failed = executor.run, list[str]()

    def broken(step: Step, samplers: Any) -> Any:
        if most is not None and len(step.tokens) > most:
            failed.append("memory")
            raise torch.OutOfMemoryError("injected")
        if rng.random() < chance / 2:
            failed.append("before the pass")
            raise InjectedError(failed[-1])
        chosen = run(step, samplers)
        if rng.random() < chance / 2:
            failed.append("after the pass")
            raise InjectedError(failed[-1])
        return chosen

    executor.run = broken  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        del executor.run


@contextmanager
def failing_logits(engine: Engine, rng: Random, chance: float) -> Iterator[list[str]]:
    """Let rows of logits by chance hold no number: what a device leaves whose pass went wrong without a word."""
    executor = engine._core.loop.executor
    compute, failed = executor.logits, list[str]()

    def broken(*args: Any) -> torch.Tensor:
        logits = compute(*args)
        rows = [row for row in range(len(logits)) if rng.random() < chance]
        if rows:
            failed.append("not finite")
            logits = logits.clone()
            logits[rows] = rng.choice(NO_NUMBERS)
        return logits

    executor.logits = broken  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        del executor.logits


def any_fault(engine: Engine, rng: Random) -> Any:
    """One of all, for a block; yields what has failed so far."""
    return sampler_fault(engine, rng) if rng.random() < 0.3 else other_fault(engine, rng)


def sampler_fault(engine: Engine, rng: Random) -> Any:
    """One of drawing, for a block."""
    if rng.random() < 0.4:
        return failing_logits(engine, rng, rng.choice([0.1, 0.5, 1.0]))
    owner, name = DRAWING[rng.choice(sorted(DRAWING))]
    return failing_once(owner, name, at=rng.randrange(4), after=name != "fill_during" and rng.random() < 0.5)


def is_of_sampler(failed: str) -> bool:
    """Whether what has failed is of drawing, as faults tell it."""
    return failed == "not finite" or failed in {f"{owner.__name__}.{name}" for owner, name in DRAWING.values()}


def other_fault(engine: Engine, rng: Random) -> Any:
    """One of passes, memory and the bookkeeping of calls, for a block."""
    kind = rng.choice(["steps", "memory", "end", "end", "before", "before"])
    if kind == "steps":
        return failing_steps(engine, rng, rng.choice([0.2, 0.6, 1.0]))
    if kind == "memory":
        return failing_steps(engine, rng, 0.0, rng.choice([1, 5, 20]))
    named = AT_THE_END if kind == "end" else BEFORE
    owner, name = named[rng.choice(sorted(named))]
    after = kind == "end" and name != "finish" and rng.random() < 0.5
    return failing_once(owner, name, at=rng.randrange(4), after=after)
