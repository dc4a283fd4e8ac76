"""Calls that run in actors: they say what they would say in this process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from threading import Lock
from traceback import format_exception
from typing import Any

import pytest
import ray
from choreo_ray import RayEngine
from choreo_ray.client import RayEngineClient
from choreo_ray.remote import COPIED_BYTES, Copying, Costs
from choreo_ray.remote.routing import CallToPlace, EngineAhead, Route
from remote_support.loopback import routed
from torture.chaos import GRAPHS
from torture.chaos import said as graph_said

from choreo_agents import Constraint, Engine, MessageHandle, Sampling
from choreo_agents.errors import (
    ConstraintError,
    EngineClosedError,
    InvalidRequestError,
    ReleasedHandleError,
    UnknownHandleError,
)
from choreo_agents.tracing import EngineDown, EngineUp, KVCopied, RequestRouted

Make = Callable[..., RayEngine]
LONG = Sampling(max_tokens=300, temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def here() -> Iterator[Engine]:
    """An engine in this process."""
    with Engine.load("embedded") as engine:
        yield engine


def said(engine: Engine) -> list[str]:
    """A few messages of three agents that read each other, greedy and sampled."""
    alice = engine.prefill("Alice: the record says nine.", author="alice")
    bob = engine.prefill("Bob: it says four.", author="bob")
    made: list[MessageHandle] = []
    for heat in (0.0, 0.9):
        one = Sampling(max_tokens=12, temperature=heat, seed=5)
        carol = engine.decode("Carol:", parents=[alice, bob], author="carol", sampling=one)
        other = Sampling(max_tokens=12, temperature=heat)
        dan = engine.decode("Dan:", parents=[bob, carol], author="dan", sampling=other)
        made += [carol, dan]
    return [engine.text(each) for each in made]


def until(what: Callable[[], object]) -> None:
    """Wait until something is so."""
    while not what():
        time.sleep(0.02)


def counted(router: RayEngine, name: str) -> int:
    """What its engines have counted together."""
    return sum(getattr(stats, name) for stats in router.engine_stats().values())


def test_they_say_what_an_engine_in_this_process_says(router: Make, here: Engine) -> None:
    engine = router()
    assert said(engine) == said(here)


def test_a_stream_has_each_token_once(router: Make, here: Engine) -> None:
    def streamed(engine: Engine) -> tuple[list[str], str]:
        *pieces, handle = engine.stream("Bob:", sampling=Sampling(max_tokens=40, temperature=0.8, seed=3))
        assert isinstance(handle, MessageHandle)
        return [piece.text for piece in pieces], engine.text(handle)

    told, text = streamed(router())
    assert (told, text) == streamed(here) and len(told) > 1


def test_who_leaves_a_stream_ends_the_call_in_its_actor(router: Make) -> None:
    engine = router()
    for number in range(3):
        for _ in range(8):  # on a busy machine a call may have said all before its reader has left
            cancelled = counted(engine, "cancelled")
            stream = engine.stream("Bob:", sampling=Sampling(max_tokens=2000, stop_tokens=()))
            assert len(list(islice(stream, number))) == number  # 0: it has not begun
            stream.close()
            until(lambda: counted(engine, "unfinished") == 0)
            if counted(engine, "cancelled") == cancelled + min(number, 1):
                break
        else:
            raise AssertionError("eight calls went on to their end after their readers had left")


async def test_a_call_that_is_cancelled_as_soon_as_it_is_sent_ends_in_its_actor(router: Make) -> None:
    engine = router()
    calls = [asyncio.ensure_future(engine.adecode("Bob:", sampling=LONG)) for _ in range(16)]
    in_time = []  # on a busy machine one may have said all before it is cancelled
    for number, call in enumerate(calls):
        await asyncio.sleep(0.002 * (number % 4))
        in_time.append(call.cancel())
    ended = await asyncio.gather(*calls, return_exceptions=True)
    kinds = [asyncio.CancelledError if cancelled else MessageHandle for cancelled in in_time]
    assert [type(each) for each in ended] == kinds and any(in_time)
    await asyncio.to_thread(until, lambda: counted(engine, "unfinished") == 0)
    assert engine.stats().unfinished == 0


async def test_calls_of_one_time_share_steps(router: Make, here: Engine) -> None:
    engine = router()
    before = [counted(engine, name) for name in ("steps", "decode_rows")]

    def calls(of: Engine) -> list[Any]:
        each = (Sampling(max_tokens=48, temperature=0.7, seed=number) for number in range(32))
        return [of.adecode(f"Agent {number}:", sampling=sampling) for number, sampling in enumerate(each)]

    made = await asyncio.gather(*calls(engine))
    steps, tokens = (now - then for now, then in zip(_now(engine), before, strict=True))
    assert steps < tokens / 2, f"{steps} steps for {tokens} tokens"
    expected = await asyncio.gather(*calls(here))
    assert [engine.text(each) for each in made] == [here.text(each) for each in expected]


def _now(engine: RayEngine) -> list[int]:
    return [counted(engine, name) for name in ("steps", "decode_rows")]


def test_an_error_arrives_as_it_was_raised(router: Make) -> None:
    engine = router()
    with pytest.raises(ConstraintError) as refused:
        engine.decode("Bob:", sampling=Sampling(constraint={"regex": "[a-z]{90}"}, max_tokens=9))
    assert type(refused.value) is ConstraintError and "max_tokens=9" in str(refused.value)
    assert re.fullmatch(" ?[a-z]{3,80}", refused.value.text), "its fields are there"


def test_a_guide_that_cannot_be_sent_is_refused_by_its_key_and_tells_no_secret(router: Make) -> None:
    held: Any = Lock()  # which nobody can copy
    constraint = Constraint("mine", lambda model, ends: held)
    with pytest.raises(InvalidRequestError, match="constraint 'mine' cannot be sent to engine") as refused:
        router().decode("Bob:", constraint=constraint)
    assert "SentCall" not in "".join(format_exception(refused.value))


def test_what_is_released_goes_there_too(router: Make) -> None:
    engine = router()
    notes = [engine.prefill(f"Alice: note {number}.") for number in range(5)]
    until(lambda: counted(engine, "messages") == 5)
    for note in notes:
        engine.release(note)
    until(lambda: counted(engine, "messages") == 0)
    with pytest.raises(ReleasedHandleError):
        engine.text(notes[0])


def test_fronts_share_engines_and_nothing_else(router: Make) -> None:
    one, other = router(), router()
    note = one.prefill("Alice: the record says nine.")
    mine = other.prefill("Alice: the record says nine.")
    assert note != mine, "neither has a salt that the other could have"
    one.close()
    until(lambda: counted(other, "messages") == 1)
    assert other.text(other.decode("Bob:", parents=[mine], sampling=Sampling(max_tokens=4)))
    with pytest.raises(EngineClosedError):
        one.text(note)
        one.prefill("Alice: more.")
    with pytest.raises(EngineClosedError):
        one.engine_stats()


def brought(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """To the engine that has the least of what a call reads, which is copied there."""
    to = min(engines, key=lambda engine: sum(engine.name in read.holders for read in call.reads))
    lacking = [read for read in call.reads if read.holders and to.name not in read.holders]
    copies = {read.id: next(iter(read.holders)) for read in lacking}
    return Route(to.name, copies, (), sum(read.nbytes for read in lacking), 0, 0.0)


def test_kv_goes_from_actor_to_actor_and_not_through_the_front(
    router: Make, here: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    given: list[Any] = []
    give = RayEngineClient.export_kv

    async def spied(self: RayEngineClient, copying: Copying) -> Any:
        given.append(await give(self, copying))
        return given[-1]

    monkeypatch.setattr(RayEngineClient, "export_kv", spied)
    engine = routed(router(sink=events.append), brought)
    note, own = engine.prefill("Alice: " + "so it is. " * 50), here.prefill("Alice: " + "so it is. " * 50)
    received = counted(engine, "received_bytes")
    say = Sampling(max_tokens=20, temperature=0.8, seed=3)
    answer = engine.decode("Bob:", [note], sampling=say)
    assert engine.text(answer) == here.text(here.decode("Bob:", [own], sampling=say))
    copied = [each for each in events if isinstance(each, KVCopied)]
    expected = len(engine.tokens(note)) * here.model.adapter.geometry.bytes_per_token
    assert [(each.messages, each.refused, each.bytes) for each in copied] == [(1, 0, expected)]
    assert counted(engine, "received_bytes") - received == expected
    assert engine.usage(answer).tokens_recomputed == 0
    assert [type(each) for each in given[0]] == [ray.ObjectRef], "what the router has is where to find it"


def test_an_engine_that_is_drained_hands_over_what_it_alone_has(router: Make) -> None:
    events: list[Any] = []
    engine = router(sink=events.append)
    notes = [engine.prefill(f"Alice: note {number} says so." * 3) for number in range(6)]
    [held] = {each.engine for each in events if isinstance(each, RequestRouted)}
    assert engine.drain(held) == len(notes)
    encoded = counted(engine, "tokens_encoded")
    answer = engine.decode("Bob:", parents=notes, sampling=Sampling(max_tokens=3))
    ran_at = [each.engine for each in events if isinstance(each, RequestRouted)][-1]
    assert ran_at != held, "nothing new is placed there"
    assert counted(engine, "tokens_encoded") - encoded == len(engine.tokens(answer)), "what is read is there"
    with pytest.raises(InvalidRequestError, match="no other could take over"):
        engine.drain(ran_at)
    engine.close()
    with pytest.raises(EngineClosedError, match="load a new one"):
        engine.drain(ran_at)


def test_what_is_on_its_way_leaves_half_of_the_object_store(router: Make) -> None:
    def most(engine: RayEngine) -> int:
        return int(engine._core.execution.fleet._copied_bytes)  # type: ignore[attr-defined]

    share = ray.cluster_resources()["object_store_memory"] / 2
    assert most(router()) == round(share / 2) < COPIED_BYTES, "two engines have a store of 600 MB"
    assert most(router(copied_bytes=1 << 20)) == 1 << 20


class Watched:
    """A router, and what it has told.

    Args:
        router: Makes it.
    """

    def __init__(self, router: Make) -> None:
        self.events: list[Any] = []
        self.engine = router(sink=self.events.append)

    def ran_at(self) -> str:
        """The engine that the last call was sent to."""
        return [each.engine for each in self.events if isinstance(each, RequestRouted)][-1]

    def told(self, kind: type[EngineUp] | type[EngineDown]) -> list[str]:
        """The engines that came, or went."""
        return [each.engine for each in self.events if isinstance(each, kind)]

    def kill(self, name: str) -> None:
        """End an engine's process."""
        assert self.engine._actors is not None
        [far] = [each for each in self.engine._actors.clients if each.name == name]
        os.kill(ray.get(far.actor.there.remote()), signal.SIGKILL)


def alices(engine: Engine) -> MessageHandle:
    return engine.prefill("Alice: the record says nine.", author="alice")


@pytest.mark.slow
def test_what_an_actor_had_is_computed_again_when_it_was_idle(router: Make, here: Engine) -> None:
    watched = Watched(router)
    note, own = alices(watched.engine), alices(here)
    for header in ("Bob:", "Carol:"):  # the second when what the first had killed is back
        *expected, _ = here.stream(header, parents=[own], sampling=LONG)
        came = len(watched.told(EngineUp))
        watched.kill(watched.ran_at())
        assert watched.engine.text(note) == "Alice: the record says nine."
        *told, _ = watched.engine.stream(header, parents=[note], sampling=LONG)
        assert told == expected
        until(lambda came=came: len(watched.told(EngineUp)) > came)
    assert len(watched.told(EngineDown)) == 2
    watched.kill(watched.ran_at())
    assert router().prefill([7] * 3).length == 3, "who comes while it is started again waits"


@pytest.mark.slow
def test_a_call_whose_actor_dies_ends_elsewhere_with_the_same_words(router: Make, here: Engine) -> None:
    watched = Watched(router)
    note, own = alices(watched.engine), alices(here)
    *expected, _ = here.stream("Carol:", parents=[own], sampling=LONG)
    stream = watched.engine.stream("Carol:", parents=[note], sampling=LONG)
    told = list(islice(stream, 3))
    watched.kill(first := watched.ran_at())
    *rest, handle = stream
    assert [*told, *rest] == expected
    assert watched.told(EngineDown) == [first] and watched.ran_at() != first
    assert isinstance(handle, MessageHandle)
    again = watched.engine.decode("Dan:", parents=[note, handle], sampling=Sampling(max_tokens=4))
    assert watched.engine.text(again).startswith("Dan:")


def apart(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """As `brought`, but that all is encoded again there."""
    found = brought(call, engines, costs)
    return Route(found.engine, {}, tuple(found.copies), 0, found.bytes_copied, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("routing", [None, brought, apart], ids=["as-it-comes", "copied-apart", "encoded-apart"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_say_the_same_on_two_actors(router: Make, here: Engine, graph: str, routing: Any) -> None:
    events: list[Any] = []
    engine = router(sink=events.append)
    if routing is not None:
        routed(engine, routing)
    assert graph_said(engine, graph, seed=3) == graph_said(here, graph, seed=3)
    placed = {each.engine for each in events if isinstance(each, RequestRouted)}
    assert routing is None or len(placed) == 2
    copied = sum(each.bytes for each in events if isinstance(each, KVCopied))
    assert routing is None or bool(copied) == (routing is brought)


def test_what_a_front_had_is_said_to_be_gone_with_it(router: Make) -> None:
    one = router(salt="shared")
    note = alices(one)
    one.close()
    with pytest.raises(UnknownHandleError, match="encode the text again"):
        router(salt="shared").decode("Bob:", [note])
