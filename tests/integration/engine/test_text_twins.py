"""The baseline re-encodes text less its longest encoded prefix; naive re-encodes all of it; both say the same."""

from __future__ import annotations

import asyncio
import random

import pytest
from conftest import HoldSteps, MakeEngine
from support.stepping import until

from choreo_agents import Decode, Prefill, Sampling

SHORT = Sampling(max_tokens=5, stop_tokens=())


def test_prefill_stores_text_only(make_engine: MakeEngine) -> None:
    for method in ("baseline", "naive"):
        engine = make_engine(method=method)
        root = engine.prefill([5, 6, 7])
        assert engine.prefill([8], [root], [9], 3).length == 1
        assert engine.stats().tokens_encoded == 0 and engine.stats().kv_bytes == 0


def test_counts_of_a_reordered_view(make_engine: MakeEngine) -> None:
    """root a b, then root b a: the baseline finds the root, naive nothing, choreo all three."""
    encoded = {}
    for method in ("choreo", "baseline", "naive"):
        engine = make_engine(method=method)
        root = engine.prefill([5] * 10)
        a, b = engine.prefill([Prefill([6] * 10, [root]), Prefill([7] * 10, [root])])
        for view in ([root, a, b], [root, b, a]):
            engine.decode([8], view, sampling=SHORT)
        stats = engine.stats()
        encoded[method] = (stats.tokens_encoded, stats.tokens_reused)
    # A twin does not encode the last sampled token: nobody will read it.
    assert encoded["choreo"] == (30 + 2 * 6, 2 * 10 + 2 * 30)
    assert encoded["baseline"] == (31 + 4 + 21 + 4, 10)
    assert encoded["naive"] == (2 * (31 + 4), 0)


def test_the_prefix_cache_reuses_what_was_generated(make_engine: MakeEngine) -> None:
    engine = make_engine(method="baseline")
    root = engine.prefill([5] * 10)
    said = engine.decode([8], [root], sampling=SHORT)
    before = engine.stats()
    engine.decode([9], [root, said], sampling=SHORT)
    after = engine.stats()
    assert after.tokens_reused - before.tokens_reused == 10 + 1 + 4
    assert after.tokens_encoded - before.tokens_encoded == 1 + 1 + 4


async def test_sixteen_voters_over_one_prompt_encode_it_once(make_engine: MakeEngine, hold_steps: HoldSteps) -> None:
    """Those that arrive while the prompt is being encoded wait for it instead of encoding it again."""
    engine = make_engine(method="baseline", max_batched_tokens=64)
    root = engine.prefill([5 + i % 200 for i in range(300)])
    voters = [Decode([7, 8], [root], sampling=SHORT.model_copy(update={"seed": i})) for i in range(16)]
    steps = hold_steps(engine)
    early = asyncio.create_task(engine.adecode(voters[:8]))
    await steps.amake(2)
    late = asyncio.create_task(engine.adecode(voters[8:]))
    await until(lambda: engine.stats().unfinished == 16)
    steps.go_on()
    await asyncio.gather(early, late)
    stats = engine.stats()
    assert stats.tokens_encoded == 302 + 15 * 1 + 16 * 4
    assert stats.tokens_reused == 15 * 301


async def test_cancelling_the_one_who_encodes_lets_another_take_over(
    make_engine: MakeEngine, hold_steps: HoldSteps
) -> None:
    engine = make_engine(method="baseline", max_batched_tokens=16)
    root = engine.prefill([5 + i % 200 for i in range(400)])
    steps = hold_steps(engine)
    first = asyncio.create_task(engine.adecode([7], [root], sampling=SHORT))
    await steps.amake(3)
    second = asyncio.create_task(engine.adecode([8], [root], sampling=SHORT))
    await until(lambda: engine.stats().unfinished == 2)
    await steps.amake(1)
    first.cancel()
    await asyncio.sleep(0)
    steps.go_on()
    assert (await second).length == 6
    stats = engine.stats()
    assert stats.tokens_encoded == 401 + 4 and stats.cancelled == 1


def test_the_prefix_cache_gives_way_when_memory_runs_out(make_engine: MakeEngine) -> None:
    """Old prefixes are evicted; no answer changes."""
    small = make_engine(method="baseline", kv_budget_bytes=160 * 3 * 64 * 4)
    naive = make_engine(method="naive")
    rng = random.Random(0)
    texts = [[rng.randrange(5, 300) for _ in range(40)] for _ in range(6)]
    for _ in range(20):
        parents = rng.sample(texts, 2)
        said = [
            engine.tokens(engine.decode([7], [engine.prefill(text) for text in parents], sampling=SHORT))
            for engine in (small, naive)
        ]
        assert said[0] == said[1]
        small.check()
    assert small.stats().tokens_reused > 0


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_say_the_same_under_both_twins(make_engine: MakeEngine, seed: int) -> None:
    rng = random.Random(seed)
    engines = [make_engine(method="baseline", max_batched_tokens=32), make_engine(method="naive")]
    handles: list[list] = [[], []]
    for _ in range(6):
        draws = []
        for _call in range(rng.randint(1, 5)):
            picks = [rng.randrange(len(handles[0])) for _ in range(rng.randint(0, 3))] if handles[0] else []
            header = [rng.randrange(5, 12) for _ in range(rng.randint(1, 6))]
            draws.append((header, picks))
        for engine, own in zip(engines, handles, strict=True):
            calls = [Decode(header, [own[i] for i in picks], sampling=SHORT) for header, picks in draws]
            own.extend(engine.decode(calls))
            engine.check()
    assert [engines[0].tokens(h) for h in handles[0]] == [engines[1].tokens(h) for h in handles[1]]
    assert engines[0].stats().tokens_encoded < engines[1].stats().tokens_encoded
