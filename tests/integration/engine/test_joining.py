"""Messages that come into the view of a decode while it runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine

from choreo_agents import Decode, Engine, Joining, MessageHandle, Sampling, StreamedToken
from choreo_agents.errors import (
    ContextLengthError,
    EngineClosedError,
    ForeignHandleError,
    InvalidRequestError,
    ReleasedHandleError,
    TrainingError,
    UnknownHandleError,
)
from choreo_agents.training.recording import record

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""
HEADER = [7, 8, 9]


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 360) for _ in range(count)]


def forced(count: int, seed: int = 1) -> Sampling:
    return Sampling(forced=tuple(tokens(seed, count)))


def after(count: int, act: Callable[[], Any]) -> Callable[[torch.Tensor], None]:
    """Acts once, before the token that follows so many sampled ones was sampled."""
    left = [count]

    def watch(_: torch.Tensor) -> None:
        if left[0] == 0:
            act()
        left[0] -= 1

    return watch


def grown(
    engine: Engine, view: list[MessageHandle], late: list[MessageHandle], at: int = 5, count: int = 12, **options: Any
) -> MessageHandle:
    """A decode over a view, and what came into it after so many sampled tokens."""
    joining = engine.branches.joining()

    def add() -> None:
        for place, handle in enumerate(late):
            assert joining.add(handle, 50 * place)

    call = Decode(HEADER, view, sampling=forced(count), watch=after(at, add), joining=joining, **options)
    [handle] = engine.decode([call])
    return handle


def test_a_joining_is_for_one_call(engine: Engine) -> None:
    late, joining, twice = engine.prefill(tokens(4, 9)), engine.branches.joining(), engine.branches.joining()
    joining.add(late, 0)
    engine.decode([7], sampling=forced(2), joining=joining)
    engine.release(late)
    before = engine.stats().messages
    with pytest.raises(InvalidRequestError, match="given to another call"):
        engine.decode([8], sampling=forced(60), joining=joining)
    with pytest.raises(InvalidRequestError, match="given to another call"):
        engine.decode([Decode([token], sampling=forced(2), joining=twice) for token in (8, 9)])
    assert engine.stats().messages == before and not engine.stats().unfinished


def test_what_comes_late_changes_nothing_before_it(engine: Engine) -> None:
    first, late = engine.prefill(tokens(2, 20)), engine.prefill(tokens(3, 20))
    seen: dict[bool, list[torch.Tensor]] = {}
    for joins in (False, True):
        logits = seen[joins] = []
        joining = engine.branches.joining()
        add = after(6, lambda: joining.add(late, 0)) if joins else None  # noqa: B023

        def watch(each: torch.Tensor, logits: Any = logits, add: Any = add) -> None:
            logits.append(each.detach().clone())
            if add is not None:
                add(each)

        engine.decode([Decode(HEADER, [first], sampling=forced(12), watch=watch, joining=joining)])
    same = [torch.equal(one, other) for one, other in zip(seen[False], seen[True], strict=True)]
    assert same == [True] * 7 + [False] * 5


def test_its_id_and_lineage_say_when_it_came(engine: Engine) -> None:
    first, late = engine.prefill(tokens(2, 20), author="ann"), engine.prefill(tokens(3, 20), author="bo")
    four, five, again = (grown(engine, [first], [late], at) for at in (4, 5, 4))
    assert four == again != five and engine.tokens(four) == engine.tokens(five)
    assert engine.inspect.joined(four) == {late: len(HEADER) + 4} and engine.inspect.joined(first) == {}
    assert engine.inspect.ancestors(four) == {first: "ann", late: "bo"}
    [lineage] = engine.inspect.audit([four]).messages
    assert {(*each.authors, *each.channels) for each in lineage.ancestors} == {("ann", "encoding"), ("bo", "encoding")}
    made = engine.inspect.records([four])[-1]
    assert (made.parents, made.offsets, made.since) == ((first, late), (0, 0), (0, len(HEADER) + 4))
    assert engine.usage(four).tokens_reused == 40
    with pytest.raises(TrainingError, match="quorum=None"):
        record(engine, "grown", [four])


def test_what_was_added_before_the_decode_is_a_parent_like_any_other(engine: Engine) -> None:
    first, late = engine.prefill(tokens(2, 20)), engine.prefill(tokens(3, 20))
    joining = engine.branches.joining()
    assert joining.add(late, 30)
    early = engine.decode(HEADER, [first], sampling=forced(5), joining=joining)
    assert early == engine.decode(HEADER, [first, late], [0, 30], 20, sampling=forced(5)) and not engine.inspect.joined(
        early
    )


def test_all_answers_of_a_call_see_it(engine: Engine) -> None:
    late, joining = engine.prefill(tokens(3, 20)), engine.branches.joining()
    sampling = Sampling(n=3, temperature=1.0, max_tokens=8, stop_tokens=(), seed=4)
    watch = after(2, lambda: joining.add(late, 0))
    made = engine.decode([Decode(HEADER, sampling=sampling, watch=watch, joining=joining)])
    assert len({*made}) == 3 and all(engine.inspect.joined(each).keys() == {late} for each in made)


@pytest.mark.parametrize("kind", ["lost", "host", "disk"])
def test_what_left_the_pool_comes_as_soon_as_it_is_back(make_engine: MakeEngine, tmp_path: Path, kind: str) -> None:
    tier = {"lost": {}, "host": {"host_bytes": 1 << 20}, "disk": {"disk": tmp_path}}[kind]
    engine = make_engine(**tier)
    parent = engine.prefill(tokens(2, 20))
    late = engine.decode(HEADER, [parent], sampling=forced(9))
    engine.release(parent)
    engine.kv.park()
    while kind == "disk" and engine.kv.memory_map().tiers["host"]:
        pass  # it is on its way
    made = grown(engine, [], [late], at=3, count=60)
    since = engine.inspect.joined(made)[late]
    assert since == len(HEADER) + 3 if kind == "host" else len(HEADER) + 3 < since < len(HEADER) + 60
    stats = engine.stats()
    assert {"lost": stats.recomputed, "host": stats.restored_from_host, "disk": stats.restored_from_disk}[kind] >= 1


def test_without_room_for_it_the_decode_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=128 * TOKEN)
    late = engine.prefill(tokens(2, 60))
    engine.kv.park()
    made = grown(engine, [], [late], count=90)
    assert engine.inspect.joined(made) == {} and engine.inspect.ancestors(made) == {}
    assert engine.inspect.joined(grown(engine, [], [late], count=40)).keys() == {late}


def test_it_may_be_released_as_soon_as_it_was_added(engine: Engine) -> None:
    late, joining = engine.prefill(tokens(3, 20)), engine.branches.joining()

    def act() -> None:
        joining.add(late, 0)
        engine.release(late)

    [made] = engine.decode([Decode(HEADER, sampling=forced(9), watch=after(4, act), joining=joining)])
    assert engine.inspect.joined(made) == {late: len(HEADER) + 4}
    engine.release(made)
    assert engine.stats().kv_bytes == 0


def test_after_its_end_it_is_told_so(engine: Engine) -> None:
    late, joining = engine.prefill(tokens(3, 20)), engine.branches.joining()
    made = engine.decode(HEADER, sampling=forced(4), memo="once", joining=joining)
    assert joining.add(late, 0) is False
    again = engine.branches.joining()
    assert engine.decode(HEADER, sampling=forced(4), memo="once", joining=again) == made
    assert again.add(late, 0) is False, "it was answered before"


def test_what_comes_with_the_last_token_is_left_out(engine: Engine) -> None:
    late = engine.prefill(tokens(3, 20))
    assert engine.inspect.joined(grown(engine, [], [late], at=11, count=12, closing=[5, 6])) == {}


@pytest.mark.parametrize("method", ["baseline", "naive"])
def test_words_cannot_be_put_into_the_middle_of_a_text(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(method=method)
    late, joining, told = engine.prefill(tokens(3, 20)), engine.branches.joining(), list[bool]()
    watch = after(2, lambda: told.append(joining.add(late, 0)))
    [made] = engine.decode([Decode(HEADER, sampling=forced(6), watch=watch, joining=joining)])
    assert told == [False] and engine.inspect.joined(made) == {} and late not in engine.inspect.ancestors(made)


def test_only_ones_own_messages_can_be_added(engine: Engine, make_engine: MakeEngine, embedded: Any) -> None:
    other, released = engine.tenant("other"), engine.prefill(tokens(4, 9))
    engine.release(released)
    foreign = make_engine(embedded).prefill(tokens(5, 9))
    long = engine.prefill(tokens(6, 100))
    joining = engine.branches.joining()
    for handle, error in (
        (other.prefill(tokens(3, 20)), UnknownHandleError),
        (released, ReleasedHandleError),
        (foreign, ForeignHandleError),
    ):
        with pytest.raises(error):
            joining.add(handle, 0)
    with pytest.raises(ContextLengthError, match="further in front"):
        joining.add(long, 1000)
    for offset in (-1, True, 1.5):
        with pytest.raises(InvalidRequestError, match="position of 0 or more"):
            joining.add(long, offset)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="another engine's or tenant's"):
        other.decode(HEADER, joining=joining)
    assert not engine.inspect.joined(engine.decode(HEADER, sampling=forced(4), joining=joining))


def started(engine: Engine, joining: Joining, view: list[MessageHandle]) -> tuple[Any, threading.Event]:
    """A decode that waits in its first step until it is let go."""
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go.wait(20)

    call = Decode(HEADER, view, sampling=forced(30), watch=after(0, hold), joining=joining)
    [answer] = engine._tenant.submit([call], None)
    assert begun.wait(20)
    return answer, go


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("end", ["cancel", "restart"])
def test_a_decode_that_is_given_up_gives_everything_back(make_engine: MakeEngine, end: str, parked: bool) -> None:
    engine = make_engine()
    first, late, joining = engine.prefill(tokens(2, 20)), engine.prefill(tokens(3, 20)), engine.branches.joining()
    answer, go = started(engine, joining, [first])
    if parked:
        engine.kv.park()
    assert joining.add(late, 0)
    if end == "cancel":
        answer.cancel()
        go.set()
    else:
        threading.Timer(0.1, go.set).start()
        engine.owner.restart()
        assert isinstance(answer.exception(20), EngineClosedError)
    while engine.stats().unfinished:
        pass
    assert joining.add(late, 0) is False
    engine.check()
    for handle in (first, late):
        assert engine._tenant.find(handle).entry.wanted == 0  # type: ignore[union-attr]
        engine.release(handle)
    assert engine.stats().kv_bytes == 0 and engine.stats().messages == 0


def test_a_message_that_cannot_be_computed_again_is_left_out(make_engine: MakeEngine) -> None:
    engine = make_engine()
    late, joining = engine.prefill(tokens(3, 20)), engine.branches.joining()
    engine.kv.park()
    answer, go = started(engine, joining, [])

    def fails(*_: Any) -> Any:
        done: Future[None] = Future()
        done.set_exception(EngineClosedError("it failed"))
        return done, None

    for arrivals in joining._views:
        arrivals._recompute = fails  # type: ignore[attr-defined]
    assert joining.add(late, 0)
    go.set()
    made = answer.result(20)
    assert engine.inspect.joined(made) == {} and engine._tenant.find(late).entry.wanted == 0  # type: ignore[union-attr]


async def test_a_stream_takes_it_in(engine: Engine) -> None:
    late, joining, said = engine.prefill(tokens(3, 20)), engine.branches.joining(), 0
    async for item in engine.astream(HEADER, sampling=forced(200), joining=joining):
        if isinstance(item, StreamedToken):
            said += 1
            if said == 3:
                assert joining.add(late, 0)
        else:
            assert 3 <= engine.inspect.joined(item)[late] < 203


def test_branches_that_joined_are_no_trunk(engine: Engine) -> None:
    root, late = engine.prefill(tokens(2, 20)), engine.prefill(tokens(3, 20))
    made = [grown(engine, [root], [late], at) for at in (4, 5)]
    with engine.scope():
        merged = engine.branches.merge(made, sampling=Sampling(max_tokens=4))
        assert list(engine.inspect.ancestors(merged))[:3] == [root, *made]
