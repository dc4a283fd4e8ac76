"""Messages that are encoded when they are first read, in the step of what reads them."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from support.adapters import save_adapter
from torch import Tensor

from choreo_agents import END, START, Agent, ChoreoGraph, Decode, Engine, MessageHandle, Sampling
from choreo_agents.engine import Prefill
from choreo_agents.engine.kv_packets import export_kv, import_kv
from choreo_agents.errors import CapacityError, EngineFailedError, RequestTimeoutError
from choreo_agents.models import LoadedModel
from choreo_agents.pml import Schema, SchemaLibrary
from choreo_agents.runtime import step_trace as step_traces
from choreo_agents.runtime.loop import EngineLoop
from choreo_agents.runtime.step_trace import StepTrace

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""
Logits = dict[int, list[Tensor]]


def words(number: int, count: int = 20) -> list[int]:
    return [3 + (7 * number + 11 * place) % 300 for place in range(count)]


def chain(engine: Engine, length: int = 3, **options: object) -> list[MessageHandle]:
    """Messages each of which sees those before it, at odd places."""
    made: list[MessageHandle] = []
    for number in range(length):
        call = Prefill(words(number), made, [31 * at for at in range(number)], 100, **options)  # type: ignore[arg-type]
        made += engine.prefill([call])
    return made


def answer(engine: Engine, seen: list[MessageHandle], seed: int, **options: object) -> MessageHandle:
    sampling = Sampling(forced_token_ids=(5, 6, 9), seed=seed)
    [said] = engine.decode([Decode([7, 8], seen, None, 300, sampling, **options)])  # type: ignore[arg-type]
    return said


def require_close(one: list[Tensor], other: list[Tensor]) -> None:
    assert (torch.stack(one) - torch.stack(other)).abs().max().item() <= 1e-4


def test_a_whole_prompt_is_one_step(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    eager, lazy = make_engine(), make_engine()
    answer(eager, chain(eager), 1)
    seen = chain(lazy, lazy=True)
    assert (lazy.stats().steps, lazy.stats().tokens_encoded, lazy.stats().kv_bytes) == (0, 0, 0)
    assert set(lazy.kv.tiers(seen)) == {"lineage"}
    said = answer(lazy, seen, 2)
    # Three words and what closes nothing: one step each; the prompt is in the first of them.
    assert lazy.stats().steps == eager.stats().steps - 3 == 4
    assert lazy.stats().tokens_encoded == eager.stats().tokens_encoded
    assert lazy.stats().recomputed == 0 and set(lazy.kv.tiers(seen)) == {"device"}
    assert [lazy.usage(each).tokens_encoded for each in seen] == [0, 0, 0], "who read them first is charged"
    usage = lazy.usage(said)
    assert (usage.tokens_encoded, usage.tokens_reused, usage.prompt_tokens) == (65, 0, 65)
    require_close(logits_by_seed[1], logits_by_seed[2])


@pytest.mark.parametrize("step_tokens", [1, 7, 21, 41, 64])
def test_a_prompt_of_several_steps_is_the_same(
    make_engine: MakeEngine, logits_by_seed: Logits, step_tokens: int
) -> None:
    """What follows on something waits until a step encodes that to its end."""
    whole, parts = make_engine(), make_engine(max_batched_tokens=step_tokens)
    answer(whole, chain(whole), 1)
    answer(parts, chain(parts, lazy=True), 2)
    assert parts.stats().tokens_encoded == whole.stats().tokens_encoded
    require_close(logits_by_seed[1], logits_by_seed[2])


def test_readers_of_one_step_share_what_they_read(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    engine = make_engine()
    seen = chain(engine, lazy=True)
    calls = [Decode([7, number], seen, sampling=Sampling(forced_token_ids=(5, 6), seed=number)) for number in range(4)]
    engine.decode(calls)
    assert engine.stats().tokens_encoded == 3 * 20 + 4 * (2 + 2)
    assert engine.stats().steps == 3
    again = make_engine()
    again.decode([Decode([7, 2], chain(again), sampling=Sampling(forced_token_ids=(5, 6), seed=9))])
    require_close(logits_by_seed[2], logits_by_seed[9])


def test_what_nobody_reads_is_never_encoded(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one, other = engine.prefill([Prefill(words(1), lazy=True), Prefill(words(2), lazy=True)])
    answer(engine, [one], 1)
    assert engine.usage(other).tokens_encoded == 0 and engine.kv.tiers([other]) == ["lineage"]
    engine.release(one)
    engine.release(other)
    engine.check()


def test_it_is_the_message_that_it_would_have_been(make_engine: MakeEngine) -> None:
    eager, lazy = make_engine(salt="s"), make_engine(salt="s")
    assert chain(eager) == chain(lazy, lazy=True)
    seen = chain(lazy, lazy=True)
    assert lazy.stats().tokens_reused == 0, "what nobody has encoded is not reused"
    for one, other in zip(chain(eager), seen, strict=True):
        kv, wanted = lazy.kv.read(other), eager.kv.read(one)
        torch.testing.assert_close(kv.keys, wanted.keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(kv.values, wanted.values, atol=1e-5, rtol=0)
    # Nobody was to read them: each is its own call, and sees those before it.
    assert lazy.stats().tokens_reused == 20 + 2 * 20
    for each in seen:
        one, other = lazy.usage(each), eager.usage(each)
        assert (one.tokens_encoded, one.tokens_reused) == (other.tokens_encoded, other.tokens_reused)


def test_asked_for_at_once_it_is_encoded_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    [one] = engine.prefill([Prefill(words(1), lazy=True)])
    assert engine.prefill(words(1)) == one
    assert engine.stats().tokens_encoded == 20 and engine.kv.tiers([one]) == ["device"]
    engine.prefill(words(1))
    assert engine.stats().tokens_encoded == 20
    engine.release(one)
    engine.release(one)


def test_it_is_restored_pinned_and_lost_like_any_other(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    engine = make_engine(kv_budget_bytes=160 * TOKEN)
    seen = chain(engine, lazy=True)
    engine.kv.pin(seen[0])
    engine.kv.prefetch(seen)
    assert set(engine.kv.tiers(seen)) == {"device"} and engine.stats().recomputed == 0
    answer(engine, seen, 1)
    with engine.scope():
        engine.prefill(words(9, 100))  # takes the room of what is not pinned
    assert engine.kv.tiers(seen)[0] == "device" and "lineage" in engine.kv.tiers(seen)
    answer(engine, seen, 2)
    assert engine.stats().recomputed > 0
    require_close(logits_by_seed[1], logits_by_seed[2])
    engine.kv.unpin(seen[0])


def test_what_it_reads_may_be_released_before(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    engine = make_engine()
    seen = chain(engine, lazy=True)
    engine.release(seen[0])
    answer(engine, seen[1:], 1)
    again = make_engine()
    answer(again, chain(again)[1:], 2)
    require_close(logits_by_seed[1], logits_by_seed[2])


def test_what_has_come_back_meanwhile_is_read_where_it_is(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, logits_by_seed: Logits
) -> None:
    """Its reader waits for an encoding that is half done, when somebody brings the same message."""
    whole, engine = make_engine(salt="s"), make_engine(salt="s", max_batched_tokens=4, host_bytes=1 << 30)
    seen = whole.prefill(words(1, 60))
    answer(whole, [seen], 1)
    packets = export_kv(whole._tenant, [seen.id])
    [lazy] = engine.prefill([Prefill(words(1, 60), lazy=True)])
    account, steps = EngineLoop._account, itertools.count(1)

    def accounted(loop: EngineLoop, *rest: Any) -> None:
        account(loop, *rest)
        if next(steps) == 3:
            assert import_kv(engine._tenant, packets) == {}
            engine.kv.offload([lazy])

    monkeypatch.setattr(EngineLoop, "_account", accounted)
    answer(engine, [lazy], 2)
    require_close(logits_by_seed[1], logits_by_seed[2])


def test_a_released_message_that_others_have_read_may_be_promised_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one = engine.prefill(words(1))
    [child] = engine.prefill([Prefill(words(2), [one])])
    engine.release(one)
    [again] = engine.prefill([Prefill(words(1), lazy=True)])
    assert again == one and engine.kv.tiers([again]) == ["lineage"] and engine.usage(again).tokens_encoded == 0
    before = engine.stats().tokens_encoded
    engine.prefill(words(1))
    assert engine.stats().tokens_encoded == before + 20 and engine.kv.tiers([again]) == ["device"]
    assert engine.usage(again).tokens_encoded == 20 and engine.stats().recomputed == 0
    engine.prefill([Prefill(words(2), [one], lazy=True)])
    assert engine.usage(child).tokens_encoded == 20, "it is encoded: nothing is promised"


def test_its_reader_waits_for_what_is_on_disk(make_engine: MakeEngine, tmp_path: Path, logits_by_seed: Logits) -> None:
    engine, other = make_engine(disk=tmp_path), make_engine()
    parked = engine.prefill(words(5))
    engine.kv.offload()
    while engine.kv.tiers([parked]) != ["disk"]:
        time.sleep(0.01)
    answer(engine, [parked, *chain(engine, lazy=True)], 1)
    answer(other, [other.prefill(words(5)), *chain(other)], 2)
    assert engine.stats().restored_from_disk == 1
    require_close(logits_by_seed[1], logits_by_seed[2])


def test_without_room_its_reader_fails_and_nobody_else(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=96 * TOKEN)
    kept = engine.prefill(words(1, 70))
    engine.kv.pin(kept)
    [one] = engine.prefill([Prefill(words(2, 30), lazy=True)])
    with pytest.raises(CapacityError, match="no room"):
        answer(engine, [one], 1)
    engine.kv.unpin(kept)
    assert engine.usage(answer(engine, [one], 2)).tokens_encoded == 30 + 5


def test_a_reader_that_gives_up_leaves_it_for_the_next(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seen = chain(engine, lazy=True)
    with pytest.raises(RequestTimeoutError):
        answer(engine, seen, 1, timeout_s=0)
    answer(engine, seen, 2)
    assert engine.stats().tokens_encoded == 60 + 2 + 3


def test_a_restarted_engine_keeps_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seen = chain(engine, lazy=True)
    engine.admin.restart()
    assert engine.usage(answer(engine, seen, 1)).tokens_encoded == 60 + 5


@pytest.mark.parametrize("method", ["baseline", "naive"])
def test_twins_that_keep_text_have_nothing_to_put_off(make_engine: MakeEngine, method: str) -> None:
    one, other = make_engine(method=method), make_engine(method=method)
    answer(one, chain(one), 1)
    answer(other, chain(other, lazy=True), 1)
    assert one.stats().tokens_encoded == other.stats().tokens_encoded
    assert one.stats().steps == other.stats().steps


def test_each_message_is_encoded_by_its_own_adapter(
    make_engine: MakeEngine, tiny: LoadedModel, tiny_path: Path, tmp_path: Path, logits_by_seed: Logits
) -> None:
    folder = save_adapter(tmp_path / "mine", tiny_path)
    for seed, lazy in ((1, False), (2, True)):
        engine = make_engine()
        name = engine.load_adapter(folder)
        [plain] = engine.prefill([Prefill(words(1), lazy=lazy)])
        [own] = engine.prefill([Prefill(words(2), [plain], adapter=name, lazy=lazy)])
        answer(engine, [plain, own], seed)
    require_close(logits_by_seed[1], logits_by_seed[2])


@pytest.mark.parametrize("has_prompt", [False, True])
def test_all_that_an_agent_is_told_is_one_step(
    make_engine: MakeEngine, embedded: LoadedModel, has_prompt: bool
) -> None:
    engine = make_engine(embedded)
    graph = ChoreoGraph(system="Answer from the notes.")
    speaking = Sampling(max_tokens=1, stop_tokens=())
    told = {"system": "Notes: Max has 2 red kites.", "prompt": "What does Max have?" if has_prompt else None}
    graph.add_node("ann", Agent("ann", sampling=speaking, **told)).add_edge(START, "ann").add_edge("ann", END)  # type: ignore[arg-type]
    state = graph.compile(engine=engine).invoke({"messages": [("user", "What does Max have?")]})
    handle = MessageHandle.model_validate(state["handles"][-1]["handle"])
    first = engine.usage(handle)
    # One for all that it reads and its first word, one for that word and the end of its turn.
    assert engine.stats().steps == 2 and len(engine.logprobs(handle)) == 1
    assert engine.stats().tokens_encoded == first.tokens_encoded == first.prompt_tokens
    assert first.tokens_reused == 0, "a cold first call finds nothing"


def test_all_that_a_prompt_adds_to_its_modules_is_one_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    schema = Schema.from_text(
        "<schema name='s'>You plan. <module name='a'>Go to <parameter name='where' length='8'/> on "
        "<parameter name='when' length='8'/>.</module></schema>"
    )
    with SchemaLibrary(engine) as library:
        library.register(schema, encode="eager")
        prompt = schema.prompt("<prompt schema='s'><a where='Rome' when='Monday'/><user>Why?</user></prompt>")
        before = engine.stats().steps
        with library.assemble(prompt) as view:
            assert engine.stats().steps == before, "nothing is read yet"
            engine.release(engine.prefill("x", view.handles, view.offsets, view.end))
            assert engine.stats().steps - before == 1, "two arguments, a turn, and who reads them"
    again = make_engine()
    with SchemaLibrary(again) as library:
        library.register(schema, encode="eager")
        before = again.stats().steps
        streamed = list(library.stream(prompt, Sampling(max_tokens=1, stop_tokens=())))
        assert again.stats().steps - before == 2 and len(streamed) == 2


def test_runs_that_share_their_steps_share_their_bits(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    step_trace = StepTrace()

    async def both(engine: Engine) -> None:
        seen = chain(engine, lazy=True)
        calls = [Decode([7, n], seen[n:], sampling=Sampling(forced_token_ids=(5, 6, 9), seed=n)) for n in (0, 1)]
        await asyncio.gather(*(engine.adecode([call]) for call in calls))

    asyncio.run(both(make_engine(step_trace=step_trace)))
    first = {seed: list(seen) for seed, seen in logits_by_seed.items()}
    logits_by_seed.clear()
    asyncio.run(both(make_engine(step_trace=step_trace.replay())))
    for seed in (0, 1):
        assert all(torch.equal(*pair) for pair in zip(first[seed], logits_by_seed[seed], strict=True))


def test_a_timetable_of_readers_in_another_order_is_kept_to(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    """Promised messages are told apart by the order of the calls that promised them."""

    def run(engine: Engine, order: tuple[int, ...]) -> None:
        lazy = engine.prefill([Prefill(words(n, 20 + 40 * n), lazy=True) for n in (0, 1)])
        calls = [Decode([7], [lazy[n]], None, 300, Sampling(forced_token_ids=(5, 6), seed=n), "ab"[n]) for n in (0, 1)]
        engine.decode([calls[n] for n in order])

    step_trace = StepTrace()
    run(make_engine(step_trace=step_trace), (0, 1))
    first = {seed: list(seen) for seed, seen in logits_by_seed.items()}
    logits_by_seed.clear()
    replayed = step_trace.replay()
    run(make_engine(step_trace=replayed), (1, 0))
    assert replayed.steps == step_trace.steps
    for seed in (0, 1):
        require_close(first[seed], logits_by_seed[seed])


def test_a_prescribed_step_lets_nobody_read_what_it_cuts_short(make_engine: MakeEngine, logits_by_seed: Logits) -> None:
    plain, step_trace = make_engine(), StepTrace()
    answer(plain, chain(plain, 1), 1)
    first = make_engine(step_trace=step_trace)
    answer(first, chain(first, 1, lazy=True), 2)
    [(name, whole), reader], *rest = step_trace.steps
    cut = make_engine(step_trace=StepTrace([[(name, whole - 5), reader], [(name, 5), reader], *rest]))
    answer(cut, chain(cut, 1, lazy=True), 3)
    require_close(logits_by_seed[1], logits_by_seed[2])
    require_close(logits_by_seed[1], logits_by_seed[3])


def test_words_encoded_again_are_told_apart_by_what_they_are_of(make_engine: MakeEngine) -> None:
    """In another run they may be promised in another order: which node comes first is left to threads."""

    def run(engine: Engine, order: tuple[int, int]) -> None:
        said = [engine.prefill(words(8 + n), author="ab"[n]) for n in (0, 1)]
        calls = {n: Prefill(words(n, 20 + 40 * n), source=said[n], lazy=True) for n in order}
        again = {n: engine.prefill([call])[0] for n, call in calls.items()}
        engine.decode([Decode([7], [again[n]], None, 300, Sampling(forced_token_ids=(5,)), "ab"[n]) for n in (0, 1)])

    step_trace = StepTrace()
    run(make_engine(step_trace=step_trace, max_batched_tokens=64), (0, 1))
    kept = step_trace.replay()
    run(make_engine(step_trace=kept, max_batched_tokens=64), (1, 0))
    assert kept.steps == step_trace.steps


def test_a_timetable_that_cannot_be_kept_to_says_so(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a message that no step encodes lacks no room."""
    monkeypatch.setattr(step_traces, "PATIENCE_S", 0.1)
    step_trace = StepTrace()
    first = make_engine(step_trace=step_trace)
    answer(first, chain(first, 1, lazy=True), 1)
    [_, reader], *rest = step_trace.steps
    again = make_engine(step_trace=StepTrace([[reader], *rest]))
    with pytest.raises(EngineFailedError, match="calls that could not start"):
        answer(again, chain(again, 1, lazy=True), 2)
