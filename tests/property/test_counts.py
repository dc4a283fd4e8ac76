"""What calls are charged: every token that the engine encodes, once; and of each call, its prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from choreo_agents import Decode, Engine, Memory, MessageHandle, Prefill, Sampling, Scheduling
from choreo_agents.engine.adapters import Loaded
from choreo_agents.engine.settings import MethodName
from choreo_agents.errors import ChoreoError
from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.tracing import EventList, RequestFinished, StepRan

BUDGET = 400
"""Tokens that the pool has room for: less than a program makes, so that messages are lost and computed again."""
KINDS = ("encoded", "reused", "recomputed", "mapped")
Counts = Counter[str]


class Program:
    """Random calls on one engine, and what they should be charged."""

    def __init__(self, model: LoadedModel, rng: Random, method: MethodName = "choreo") -> None:
        self.rng = rng
        self.events = EventList()
        token = model.adapter.geometry.bytes_per_token
        self.engine = Engine.load(
            model,
            method=method,
            memory=Memory(kv_budget_bytes=BUDGET * token, host_bytes=rng.choice([0, 0, 150]) * token),
            scheduling=Scheduling(max_batched_tokens=rng.choice([512, 512, 16])),
            sink=self.events,
        )
        mapper = CacheMapper(model.adapter.geometry, model.adapter.kinds)
        self.engine._core.adapters.add_default(Loaded(Path("zero"), None, mapper, mapper.fingerprint))
        self.made: list[MessageHandle] = []
        self.prefills: list[Prefill] = []
        self.found = 0
        """Prompts of prefills that found their message."""

    def play(self, actions: int) -> None:
        does = [self.prefill, self.decode, self.decode, self.park, self.restore, self.map, self.give_up]
        for _ in range(actions):
            before = self.stats()
            with suppress(ChoreoError):  # no room for it: what was encoded until then is charged all the same
                self.rng.choice(does)()
            while self.engine.stats().unfinished:
                pass
            self.require_all_charged(self.stats() - before)
        self.engine.check()

    def stats(self) -> Counts:
        stats = self.engine.stats()
        return Counter({kind: getattr(stats, f"tokens_{kind}") for kind in KINDS})

    def require_all_charged(self, spent: Counts) -> None:
        """The sums over calls, however they ended, are what the engine has counted, and what its steps held."""
        ended = [each for each in self.events.events if isinstance(each, RequestFinished)]
        steps = [each for each in self.events.events if isinstance(each, StepRan)]
        charged = Counter({kind: sum(getattr(e, f"tokens_{kind}") for e in ended) for kind in KINDS})
        charged["reused"] += self.found
        assert +charged == +spent
        assert sum(step.tokens for step in steps) <= sum(spent[k] for k in ("encoded", "recomputed", "mapped"))
        self.events.events.clear()
        self.found = 0

    def prefill(self) -> None:
        calls, prompts = [], []
        for _ in range(self.rng.randint(1, 3)):
            call = Prefill([self.rng.randrange(5, 300)] * self.rng.choice([9, 9, 30]), self.view())
            if self.prefills and self.rng.random() < 0.5:
                call = self.rng.choice(self.prefills)
            calls.append(replace(call, lazy=self.rng.random() < 0.5))
            prompts.append(sum(handle.length for handle in call.parents) + len(call.content))
        self.prefills += calls
        known = {handle for handle in self.made if self.engine.kv.tiers([handle]) != ["lineage"]}
        promised = {handle for handle in self.made if self.engine._tenant.find(handle).promise is not None}
        handles = self.engine.prefill(calls)
        new: set[MessageHandle] = set()
        for call, handle, prompt in zip(calls, handles, prompts, strict=True):
            if self.engine.method != "choreo":
                continue
            encoded_before = handle in known or (handle in self.made and handle not in promised)
            if not call.lazy and (encoded_before or handle in new):
                self.found += prompt
            elif not call.lazy:
                assert self.engine.usage(handle).prompt_tokens == prompt
                new.add(handle)
        self.made += handles

    def decode(self) -> None:
        calls = []
        for number in range(self.rng.randint(1, 4)):
            forced = tuple(self.rng.randrange(5, 300) for _ in range(self.rng.randint(1, 6)))
            sampling = Sampling(forced_token_ids=(*forced, 300 + number), n=self.rng.choice([1, 1, 2]))
            calls.append(Decode([7, number], self.view(), sampling=sampling, priority=self.rng.choice([0, 0, 5])))
        said = self.engine.decode(calls)
        views = [call for call in calls for _ in range(call.sampling.n)]
        for handle, call in zip(said, views, strict=True):
            own = handle.length if self.engine.method == "choreo" else handle.length - 1
            usage = self.engine.usage(handle)
            assert usage.prompt_tokens == sum(parent.length for parent in call.parents) + own
            assert (
                usage.tokens_reused >= 0 and usage.tokens_outside_view <= usage.tokens_encoded + usage.tokens_recomputed
            )
        self.made += said

    def park(self) -> None:
        self.engine.kv.offload()

    def restore(self) -> None:
        self.engine.kv.prefetch(self.view())

    def map(self) -> None:
        sources = [handle for handle in self.view() if "~" not in handle.model]
        copies = {copy for each in sources for copy in self.engine._tenant.find(each).copies}
        there = {copy.parents[0].handle for copy in copies}
        seen: set[MessageHandle] = set()
        self.engine.branches.map(sources)
        if self.engine.method == "choreo":
            for source in sources:
                self.found += 2 * source.length if source in there | seen else 0
                seen.add(source)

    def give_up(self) -> None:
        forced = Sampling(forced_token_ids=tuple(range(5, 60)))
        calls = [Decode([7], self.view(), sampling=forced) for _ in range(2)]
        steps = self.engine.stats().steps + self.rng.choice([0, 1, 5])
        answers = self.engine._tenant.submit(calls, None)
        while self.engine.stats().steps < steps and self.engine.stats().unfinished:
            pass
        for answer in answers:
            if not answer.cancel():
                answer.result()

    def view(self) -> list[MessageHandle]:
        """Any messages; one may stand in it twice."""
        return self.rng.choices(self.made, k=self.rng.randint(1, 4)) if self.made else []


@settings(max_examples=15)
@given(seed=st.integers(0, 10**9))
def test_every_token_is_charged_to_one_call(tiny: LoadedModel, seed: int) -> None:
    program = Program(tiny, Random(seed))
    with program.engine:
        program.play(14)


@pytest.mark.parametrize("method", ["baseline", "naive"])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**9))
def test_text_is_charged_alike(tiny: LoadedModel, method: MethodName, seed: int) -> None:
    program = Program(tiny, Random(seed), method)
    with program.engine:
        program.play(10)


def usages(engine: Engine, handles: Sequence[MessageHandle]) -> list[tuple[int, ...]]:
    found = [engine.usage(handle) for handle in handles]
    return [(u.tokens_encoded, u.tokens_reused, u.tokens_recomputed, u.tokens_outside_view) for u in found]


def test_the_first_submitted_of_several_readers_pays(make_engine: Any) -> None:
    engine = make_engine()
    [seen] = engine.prefill([Prefill([5] * 20, lazy=True)])
    [told] = engine.prefill([Prefill([6] * 10, [seen], lazy=True)])
    calls = [
        Decode([7, 8], view, sampling=Sampling(forced_token_ids=(5, n)))
        for n, view in enumerate([[told], [told, seen]])
    ]
    said = engine.decode(calls)
    # The first attends to what `told` has seen only through it.
    assert usages(engine, said) == [(34, 0, 0, 20), (4, 30, 0, 0)]
    engine.kv.offload()
    said = engine.decode(
        [Decode([7, 9], view, sampling=Sampling(forced_token_ids=(5,))) for view in ([told, told], [seen])]
    )
    assert usages(engine, said) == [(3, 10, 30, 20), (3, 20, 0, 0)], "one message at two places is encoded once"


def test_the_first_submitted_pays_though_another_comes_first(make_engine: Any) -> None:
    engine = make_engine()
    [seen] = engine.prefill([Prefill([5] * 20, lazy=True)])
    calls = [Decode([7, 8], [seen], sampling=Sampling(forced_token_ids=(5, n)), priority=n) for n in range(3)]
    assert usages(engine, engine.decode(calls)) == [(24, 0, 0, 0), (4, 20, 0, 0), (4, 20, 0, 0)]


def test_what_is_brought_back_for_nobody_is_only_recomputed(make_engine: Any) -> None:
    engine = make_engine()
    seen = engine.prefill([5] * 20)
    told = engine.prefill([6] * 10, [seen])
    engine.kv.offload([told])
    before = engine.stats()
    engine.kv.prefetch([told])
    after = engine.stats()
    assert after.tokens_recomputed - before.tokens_recomputed == 10
    assert (after.tokens_encoded, after.tokens_reused) == (before.tokens_encoded, before.tokens_reused)
    assert usages(engine, [told]) == [(10, 20, 0, 0)], "what the call that made it has cost"


def test_what_a_mapper_makes_again_is_recomputed_too(make_engine: Any) -> None:
    engine = make_engine()
    mapper = CacheMapper(engine.model.adapter.geometry, engine.model.adapter.kinds)
    engine._core.adapters.add_default(Loaded(Path("zero"), None, mapper, mapper.fingerprint))
    [copy] = engine.branches.map([engine.prefill([5] * 20)])
    before = engine.stats()
    engine.kv.offload()
    engine.decode([7], [copy], sampling=Sampling(forced_token_ids=(5,)))
    spent = engine.stats().tokens_recomputed - before.tokens_recomputed, engine.stats().tokens_mapped
    assert spent == (20 + 20, before.tokens_mapped), "the copy, and what it is a copy of"


def test_who_goes_on_waiting_pays_the_rest(make_engine: Any) -> None:
    engine = make_engine(max_batched_tokens=8)
    [seen] = engine.prefill([Prefill([5] * 200, lazy=True)])
    calls = [Decode([7, n], [seen], sampling=Sampling(forced_token_ids=(5,))) for n in range(2)]
    first, second = engine._tenant.submit(calls, None)
    while engine.stats().tokens_encoded < 24:
        pass
    first.cancel()
    usage = engine.usage(second.result())
    assert 3 < usage.tokens_encoded < 200 and usage.tokens_reused >= 24 and usage.prompt_tokens == 200 + 3
    assert engine.stats().tokens_encoded == 200 + 3, "nothing is encoded twice"


def test_a_reader_that_gives_up_pays_for_what_it_caused(make_engine: Any) -> None:
    events = EventList()
    engine = make_engine(sink=events, max_batched_tokens=8)
    [seen] = engine.prefill([Prefill([5] * 200, lazy=True)])
    [first] = engine._tenant.submit([Decode([7], [seen], sampling=Sampling(forced_token_ids=(5,)))], None)
    while engine.stats().tokens_encoded < 24:
        pass
    first.cancel()
    last = engine.decode([8], [seen], sampling=Sampling(forced_token_ids=(5,)))
    ended = [each for each in events.events if isinstance(each, RequestFinished)]
    assert sum(each.tokens_encoded for each in ended) == engine.stats().tokens_encoded
    [gone] = [each for each in ended if each.outcome == "cancelled" and each.tokens_encoded]
    assert gone.tokens_encoded >= 24
    # What the cancelled one had begun is given up: the next reader has all of it encoded.
    assert engine.usage(last).tokens_encoded + engine.usage(last).tokens_reused == 200 + 2
