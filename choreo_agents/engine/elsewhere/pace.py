"""How fast an engine is: measured on itself when it begins, in about a second."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from statistics import median

from choreo_agents.engine.calls import Decode, Prefill
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.tenants import Tenants
from choreo_agents.sampling import Sampling

_LENGTHS = (32, 256)
"""Tokens of the prefills: their difference is encoding alone."""
_ROWS = (1, 8)
_SAMPLES = (2, 8)
"""Tokens of the decodes: their difference is steps alone."""
_LEAST_S = 1e-6
_ALIKE = 1.5
"""How much faster one of two engines may seem that are the same."""


@dataclass(frozen=True)
class Pace:
    """Of one engine that has nothing else to do."""

    encode_tokens_per_s: float
    step_s: float
    """Of a step that samples one token."""
    row_s: float
    """That each further row adds to it."""


def paced(measured: Mapping[str, Pace]) -> dict[str, Pace]:
    """The median pace of all that are as fast as each: what differs by chance is to decide nothing.

    Args:
        measured: The pace of each engine, by name.
    """
    found: dict[str, Pace] = {}
    left = sorted(measured, key=lambda name: (measured[name].step_s, name))
    while left:
        first = measured[left[0]]
        alike = [name for name in left if _alike(first, measured[name])]
        fields = zip(*(astuple(measured[name]) for name in alike), strict=True)
        found |= dict.fromkeys(alike, Pace(*map(median, fields)))
        left = [name for name in left if name not in found]
    return found


def _alike(one: Pace, other: Pace) -> bool:
    rates = (other.step_s / one.step_s, other.encode_tokens_per_s / one.encode_tokens_per_s)
    return all(1 / _ALIKE <= rate <= _ALIKE for rate in rates)


def measured_pace(tenants: Tenants) -> Pace:
    """Measure an engine by calls of a tenant of its own, of which nothing stays. Slow; from any thread but its own."""
    core, tenant = tenants.core, tenants.open(secrets.token_hex(16), None)
    drawn, scope = random.Random(0), Scope(None)
    most = core.pool.total_tokens // (2 * _ROWS[1])

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(core.model.adapter.vocabulary_size) for _ in range(count)]

    def timed(calls: list[Prefill] | list[Decode]) -> float:
        began = time.perf_counter()
        for answer in tenant.submit(calls, scope):
            answer.result()
        return time.perf_counter() - began

    def step_s(rows: int) -> float:
        took = []
        for samples in _SAMPLES:
            forced = Sampling(forced=tuple(tokens(samples)))
            took.append(timed([Decode(tokens(3), sampling=forced) for _ in range(rows)]))
        return max(_LEAST_S, (took[1] - took[0]) / (_SAMPLES[1] - _SAMPLES[0]))

    try:
        short, long = (min(length, most, core.model.adapter.max_positions // 2) for length in _LENGTHS)
        short = min(short, long // 2)
        timed([Prefill(tokens(long))])  # the first of its shape prepares what the others use
        took = [timed([Prefill(tokens(length))]) for length in (short, long)]
        step_s(1)
        one, many = (step_s(rows) for rows in _ROWS)
    finally:
        core.close_scope(scope)
        tenants.close(tenant)
    rate = (long - short) / max(_LEAST_S, took[1] - took[0])
    return Pace(rate, one, max(0.0, (many - one) / (_ROWS[1] - _ROWS[0])))
