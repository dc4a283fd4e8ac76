"""Handles, leases, scopes, memoised decodes, seeds, streaming, and the text twins."""

from __future__ import annotations

import asyncio
import gc

import pytest
from conftest import MakeEngine
from support.stepping import until

from choreo_agents import Decode, Engine, MessageHandle, Prefill, Sampling, StreamedToken
from choreo_agents.errors import (
    ContextLengthError,
    ForeignHandleError,
    InvalidRequestError,
    KVBudgetError,
    ReleasedHandleError,
    UnknownHandleError,
)

SHORT = Sampling(max_tokens=6, stop_tokens=())
WARM = Sampling(max_tokens=12, stop_tokens=(), temperature=1.0)


def test_prefilling_the_same_again_finds_it(engine: Engine) -> None:
    root = engine.prefill([5, 6, 7])
    one = engine.prefill([8, 9], [root])
    before = engine.stats()
    moved = engine.prefill([8, 9], [root], [10], 13)
    after = engine.stats()
    assert moved == one, "only relative positions matter"
    assert after.tokens_encoded == before.tokens_encoded and after.tokens_reused == before.tokens_reused + 3 + 2
    assert engine.prefill([8, 9], [root], [10], 14) != one
    assert engine.prefill([8, 9]) != one


def test_the_same_prefill_twice_in_one_batch_is_encoded_once(engine: Engine) -> None:
    one, two = engine.prefill([Prefill([5, 6, 7]), Prefill([5, 6, 7])])
    assert one == two
    assert engine.stats().tokens_encoded == 3 and engine.stats().leases == 2


def test_the_last_release_frees_the_kv_and_ends_the_handle(engine: Engine) -> None:
    handle = engine.prefill([5, 6, 7])
    assert engine.prefill([5, 6, 7]) == handle
    engine.release(handle)
    assert engine.tokens(handle) == [5, 6, 7]
    engine.release(handle)
    assert engine.stats().kv_bytes == 0
    for use in (engine.text, engine.release, lambda h: engine.decode([7], [h])):
        with pytest.raises(ReleasedHandleError, match="was released"):
            use(handle)
    assert engine.prefill([5, 6, 7]) == handle
    assert engine.tokens(handle) == [5, 6, 7]


def test_lineage_outlives_release_while_descendants_live(engine: Engine) -> None:
    root = engine.prefill([5, 6])
    middle = engine.prefill([7], [root])
    leaf = engine.decode([8], [middle], sampling=SHORT)
    engine.release(root)
    engine.release(middle)
    assert list(engine.inspect.ancestors(leaf)) == [middle, root]
    with pytest.raises(ReleasedHandleError):
        engine.tokens(root)


def test_what_is_released_in_an_open_scope_is_forgotten(engine: Engine) -> None:
    """Who says the same later is not taken for whoever said it first, and what was released takes no memory."""
    with engine.scope():
        for _ in range(20):
            engine.release(engine.prefill("Hello there.", author="ann", confidential=True))
        again = engine.prefill("Hello there.", author="bob")
        [lineage] = engine.inspect.audit([again]).messages
        assert (lineage.authors, lineage.confidential) == (frozenset({"bob"}), False)
        assert {*engine.kv.memory_map().authors} == {"bob"}


async def test_what_is_released_is_gone_without_a_collection(engine: Engine) -> None:
    gc.collect()
    before = len(engine._core.table._known)
    gc.disable()
    try:
        with engine.scope():
            root = engine.prefill([5, 6], author="ann")
            engine.decode([7], [root], sampling=SHORT, idempotency_key="k")
        # The thread that hears of an engine elsewhere still holds the call that has just ended.
        await until(lambda: len(engine._core.table._known) == before)
    finally:
        gc.enable()


def test_a_scope_drops_the_leases_taken_inside(engine: Engine) -> None:
    kept = engine.prefill([5, 6])
    before = engine.stats()
    with engine.scope():
        engine.prefill([5, 6])
        inner = engine.decode([7], [kept], sampling=SHORT)
        with engine.scope():
            engine.prefill([9, 9])
        assert engine.stats().messages == before.messages + 1
        engine.release(engine.prefill([4]))
    after = engine.stats()
    assert (after.messages, after.leases, after.kv_bytes) == (before.messages, before.leases, before.kv_bytes)
    with pytest.raises(ReleasedHandleError):
        engine.text(inner)


def test_a_memoised_decode_is_answered_once(engine: Engine) -> None:
    root = engine.prefill([5, 6])
    first = engine.decode([7], [root], sampling=WARM, idempotency_key="task 0")
    steps = engine.stats().steps
    assert engine.decode([7], [root], sampling=WARM, idempotency_key="task 0") == first
    assert engine.stats().steps == steps
    other_call = engine.decode([7], [root], sampling=WARM, idempotency_key="task 1")
    other_request = engine.decode([8], [root], sampling=WARM, idempotency_key="task 0")
    assert len({first, other_call, other_request}) == 3
    assert list(engine.stream([7], [root], sampling=WARM, idempotency_key="task 0"))[-1] == first
    for _ in range(3):
        engine.release(first)
    assert engine.decode([7], [root], sampling=WARM, idempotency_key="task 0").length == first.length
    assert engine.stats().steps > steps


def test_default_seeds_differ_between_calls_and_repeat_between_runs(make_engine: MakeEngine) -> None:
    def run(seed: int) -> list[list[int]]:
        engine = make_engine(seed=seed)
        return [engine.tokens(h) for h in engine.decode([Decode([7], sampling=WARM)] * 3)]

    once, again, other = run(0), run(0), run(1)
    assert len({tuple(tokens) for tokens in once}) == 3
    assert once == again and once != other


def test_a_given_seed_gives_the_same_tokens_whoever_shares_the_batch(engine: Engine) -> None:
    seeded = Decode([7], sampling=WARM.model_copy(update={"seed": 5}))
    alone = engine.decode([seeded])[0]
    crowd = engine.decode([Decode([8 + i], sampling=WARM) for i in range(5)] + [seeded])
    assert engine.tokens(crowd[-1]) == engine.tokens(alone)


def test_max_tokens_cut_and_closing(engine: Engine) -> None:
    """Closing tokens end the message in any case; those the model said itself are not repeated."""
    cut = engine.decode([7], sampling=Sampling(forced_token_ids=(9, 10)), turn_suffix=[2, 11])
    assert engine.tokens(cut) == [7, 9, 10, 2, 11]
    stopped = engine.decode([7], sampling=Sampling(forced_token_ids=(9, 2)), turn_suffix=[2, 11])
    assert engine.tokens(stopped) == [7, 9, 2, 11]
    assert engine.usage(cut).tokens_encoded == 5


def test_a_stop_token_ends_the_decode_and_is_part_of_it(engine: Engine) -> None:
    free = engine.tokens(engine.decode([7], sampling=SHORT))
    stop = free[3]
    stopped = engine.tokens(engine.decode([7], sampling=Sampling(max_tokens=6, stop_tokens=(stop,))))
    assert stopped == free[: free.index(stop, 1) + 1]


async def test_astream_yields_tokens_then_the_handle(engine: Engine) -> None:
    items = [item async for item in engine.astream("<|assistant|>", sampling=WARM)]
    handle = items[-1]
    assert isinstance(handle, MessageHandle)
    tokens = [item for item in items[:-1] if isinstance(item, StreamedToken)]
    assert len(tokens) == len(items) - 1
    assert [token.token for token in tokens] == engine.tokens(handle)[1:]


async def test_async_and_sync_forms_agree(engine: Engine) -> None:
    root = await engine.aprefill([5, 6])
    assert root == await asyncio.to_thread(engine.prefill, [5, 6])
    sampling = WARM.model_copy(update={"seed": 1})
    decoded = await engine.adecode([7], [root], sampling=sampling)
    assert decoded == await asyncio.to_thread(engine.decode, [7], [root], sampling=sampling)
    pair = await engine.adecode([Decode([7], [root], sampling=sampling), Decode([8], [root], sampling=sampling)])
    assert pair[0] == decoded
    assert len(await engine.aprefill([Prefill([1]), Prefill([2])])) == 2


def test_text_is_tokenized_without_adding_anything(engine: Engine) -> None:
    handle = engine.prefill("<|user|> What does Ann have?<|end|>")
    assert engine.text(handle) == "<|user|> What does Ann have?<|end|>"
    assert engine.text(handle, special=False) == " What does Ann have?"


def test_another_salt_gives_other_handles(make_engine: MakeEngine) -> None:
    mine, same, other = make_engine(salt="a"), make_engine(salt="a"), make_engine(salt="b")
    handle = mine.prefill([5, 6])
    assert same.prefill([5, 6]) == handle
    assert other.prefill([5, 6]) != handle
    with pytest.raises(UnknownHandleError):
        other.tokens(handle)


BAD_CALLS = {
    "empty header": (lambda e, h: e.decode("", [h]), "header is empty"),
    "empty content": (lambda e, h: e.prefill([], [h]), "nothing to prefill"),
    "too few offsets": (lambda e, h: e.prefill([7], [h, h], [0]), "2 parents but 1 offsets"),
    "negative offset": (lambda e, h: e.prefill([7], [h], [-1]), r"offsets\[0\] must be a position"),
    "negative new offset": (lambda e, h: e.decode([7], [h], None, -5), "position must be a position"),
    "a float offset": (lambda e, h: e.prefill([7], [h], [1.5]), r"offsets\[0\] must be a position"),
    "a token that is none": (lambda e, h: e.prefill([100000], [h]), "100000 is not a token"),
    "a batch of the wrong kind": (lambda e, h: e.decode([Decode([7]), Prefill([7])]), "must hold Decode calls only"),
    "one bad call in a batch": (lambda e, h: e.prefill([Prefill([8]), Prefill([])]), "nothing to prefill"),
    "a handle that is a dict": (lambda e, h: e.prefill([7], [h.plain()]), "expected a MessageHandle"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("method", ["choreo", "baseline"])
def test_a_bad_call_is_refused_before_any_work(make_engine: MakeEngine, name: str, method: str) -> None:
    engine = make_engine(method=method)
    root = engine.prefill([5, 6])
    before = engine.stats()
    call, message = BAD_CALLS[name]
    with pytest.raises(InvalidRequestError, match=message):
        call(engine, root)
    assert engine.stats() == before


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
def test_what_can_never_fit_is_refused_before_any_work(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(method=method, kv_budget_bytes=64 * 3 * 64 * 4 * 2)
    root = engine.prefill([5, 6])
    before = engine.stats()
    with pytest.raises(ContextLengthError, match="context ends at 1024"):
        engine.decode([7], [root], sampling=Sampling(max_tokens=1022))
    with pytest.raises(KVBudgetError, match="larger kv_budget_bytes"):
        engine.decode([7], [root], sampling=Sampling(max_tokens=500))
    if method == "choreo":
        with pytest.raises(ContextLengthError):
            engine.prefill([7], [root], [1023])
    assert engine.stats() == before


def test_foreign_and_unknown_handles(make_engine: MakeEngine, embedded: object) -> None:
    tiny, other = make_engine(), make_engine(embedded)
    foreign = other.prefill([5, 6])
    with pytest.raises(ForeignHandleError, match="this engine runs"):
        tiny.decode([7], [foreign])
    never = foreign.model_copy(update={"model": tiny.model.adapter.fingerprint})
    with pytest.raises(UnknownHandleError, match="never created it"):
        tiny.tokens(never)


def test_an_unknown_method_is_refused(tiny: object) -> None:
    with pytest.raises(ValueError, match="'choreo', 'baseline' or 'naive'"):
        Engine.load(tiny, method="magic")  # type: ignore[arg-type]
