"""A segment that several rows of a step see is read once: counted in bytes."""

from __future__ import annotations

import pytest
from conftest import MakeEngine

from choreo_agents import Decode, Sampling

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of one token's KV in the tiny model."""


def read(make_engine: MakeEngine, branches: int, trunk: int, **options: object) -> tuple[float, float]:
    """Tokens of KV that decoding some branches over a trunk reads, and would read without sharing."""
    engine = make_engine(**options)
    root = engine.prefill(list(range(3, 3 + trunk)))
    before = engine.stats()
    one = Sampling(forced_token_ids=(9, 9, 9, 9))
    engine.decode([Decode([5 + i], [root], sampling=one) for i in range(branches)])
    after = engine.stats()
    assert after.steps - before.steps == 5
    return (
        (after.kv_bytes_read - before.kv_bytes_read) / TOKEN,
        (after.kv_bytes_unshared - before.kv_bytes_unshared) / TOKEN,
    )


@pytest.mark.parametrize("branches", [1, 2, 8, 32])
def test_a_trunk_is_read_once_a_step_however_many_branches_see_it(make_engine: MakeEngine, branches: int) -> None:
    own = branches * (1 + 2 + 3 + 4 + 5)
    assert read(make_engine, branches, 100) == (5 * 100 + own, branches * 5 * 100 + own)


def test_the_reference_backend_serves_the_same(make_engine: MakeEngine) -> None:
    fast, slow = make_engine(), make_engine(backend="reference")
    sampling = Sampling(max_tokens=8, stop_tokens=())
    said = []
    for engine in (fast, slow):
        roots = [engine.prefill(list(range(low, low + 30))) for low in (3, 40)]
        said.append([engine.tokens(engine.decode([7], view, sampling=sampling)) for view in (roots, roots[::-1])])
    assert said[0] == said[1]
