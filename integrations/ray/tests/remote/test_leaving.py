"""Calls that are left, copies that nobody wants any more, and engines that are lost for a moment: nothing stays behind.

Who is left alone by somebody else goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from choreo_ray.remote import Costs, remote_engine
from choreo_ray.remote.routing import CallToPlace, EngineAhead, Route
from remote_support.loopback import WiredEngine, routed

from choreo_agents import Decode, Engine, Memory, MessageHandle, Sampling
from choreo_agents.errors import (
    EngineClosedError,
    EngineFailedError,
    EngineLostError,
    HandleError,
    RequestTimeoutError,
)
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import EngineUp, EventList

MEMORY = Memory(kv_budget_bytes=1 << 23)
WARM = Sampling(temperature=1.0, max_tokens=12, stop_tokens=(), seed=7)
NOTE = "Ann has 3 red kites. " * 4
LEFT_S = 0.3


class Wired:
    """A router over two engines behind wires, whose calls run where it is said."""

    def __init__(self, model: LoadedModel) -> None:
        self.events, self.at, self.copies = EventList(), "a", True
        self.a, self.b = (WiredEngine(name, Engine.load(model, memory=MEMORY)) for name in ("a", "b"))
        self.router = routed(remote_engine([self.a, self.b], model, sink=self.events), self.route)

    def route(self, call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
        at = self.at if any(engine.name == self.at for engine in engines) else engines[0].name
        copies = {read.id: min(read.holders) for read in call.reads if read.holders and at not in read.holders}
        return Route(at, copies if self.copies else {}, (), 0, 0, 0.0)

    def says(self, header: str, *parents: MessageHandle, **options: Any) -> str:
        """What a call says, whose message nobody needs then."""
        [made] = self.router.decode([Decode(header, list(parents), sampling=WARM, **options)])
        try:
            return self.router.text(made)
        finally:
            self.router.release(made)

    def leave(self, header: str, *parents: MessageHandle, timeout_s: float = LEFT_S) -> None:
        """Give a call up before it is answered."""
        with pytest.raises(RequestTimeoutError):
            self.says(header, *parents, timeout_s=timeout_s)

    def is_empty(self) -> bool:
        """Whether nobody has anything."""
        return self.a.held() == self.b.held() == (0, 0, 0) and self.router.stats().messages == 0

    def close(self) -> None:
        self.router.check()
        self.router.close()
        for engine in (self.a, self.b):
            assert engine.held() == (0, 0, 0)
            engine.close()


@pytest.fixture
def wired(embedded: LoadedModel) -> Iterator[Wired]:
    made = Wired(embedded)
    yield made
    for engine in (made.a, made.b):
        for gate in engine.gates.values():
            gate.open()
    made.close()


def until(what: Callable[[], object]) -> None:
    """Wait until something is so."""
    while not what():
        time.sleep(0.01)


class Meanwhile(threading.Thread):
    """Does something, and has what came of it."""

    def __init__(self, what: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.what, self.found = what, list[object]()
        self.start()

    def run(self) -> None:
        try:
            self.found.append(self.what())
        except Exception as error:
            self.found.append(error)


def test_of_readers_that_wait_for_one_copy_only_who_leaves_it_ends(wired: Wired) -> None:
    note = wired.router.prefill(NOTE)
    right = [wired.says(f"So {number}:", note) for number in range(2)]
    wired.at, gate = "b", wired.b.hold("take")
    first = Meanwhile(lambda: wired.says("So 0:", note))
    assert gate.reached.wait()
    wired.leave("Left:", note)
    last = Meanwhile(lambda: wired.says("So 1:", note))
    gate.open()
    first.join()
    last.join()
    assert [*first.found, *last.found] == right
    wired.router.release(note)
    until(wired.is_empty)


def test_a_copy_goes_on_when_who_began_it_has_left(wired: Wired) -> None:
    note = wired.router.prefill(NOTE)
    right = wired.says("So:", note)
    wired.at, gate = "b", wired.b.hold("take")
    wired.leave("Left:", note)
    waiting = Meanwhile(lambda: wired.says("So:", note))
    gate.open()
    waiting.join()
    assert waiting.found == [right]
    assert wired.b.engine.admin.stats().tokens_encoded < 40, "the note was copied"
    wired.router.release(note)
    until(wired.is_empty)


@pytest.mark.parametrize("where", ["give", "take", "taken"])
def test_what_was_released_while_it_was_copied_stays_nowhere(wired: Wired, where: str) -> None:
    note = wired.router.prefill(NOTE)
    wired.at = "b"
    gate = (wired.a if where == "give" else wired.b).hold(where)
    wired.leave("Left:", note)
    wired.router.release(note)
    gate.open()
    until(wired.is_empty)


@pytest.mark.parametrize("where", ["run", "answer"])
def test_a_call_that_was_left_leaves_nothing(wired: Wired, where: str) -> None:
    note, gate = wired.router.prefill(NOTE), wired.a.hold(where)
    for number in range(3):
        wired.leave(f"Left {number}:", note)
    gate.open()
    wired.router.release(note)
    until(wired.is_empty)


def test_a_message_that_was_on_its_way_to_an_engine_is_not_taken_to_be_there(wired: Wired) -> None:
    wired.copies = False
    note = wired.router.prefill(NOTE)
    [child] = wired.router.decode([Decode("So:", [note], sampling=WARM)])
    right = wired.says("And:", child)
    wired.at, gate = "b", wired.b.hold("run")
    wired.leave("Left:", note)
    gate.open()
    assert [wired.says("And:", child) for _ in range(2)] == [right] * 2


@pytest.mark.parametrize("error", [EngineClosedError("closed"), EngineFailedError("failed"), HandleError("unknown")])
@pytest.mark.parametrize("where", ["give", "take"])
def test_what_is_not_copied_is_encoded_again(wired: Wired, where: str, error: Exception) -> None:
    note = wired.router.prefill(NOTE)
    right = wired.says("So:", note)
    wired.at = "b"
    (wired.a if where == "give" else wired.b).fails[where] = error
    assert wired.says("So:", note) == right
    assert wired.router.stats().tokens_recomputed > 0


def test_what_is_released_while_an_engine_hands_over_stays_nowhere(wired: Wired) -> None:
    notes, gate = [wired.router.prefill(f"Ann has {number} kites.") for number in range(3)], wired.b.hold("take")
    handing = Meanwhile(lambda: wired.router._core.execution.drain("a"))
    assert gate.reached.wait()
    for note in notes:
        wired.router.release(note)
    gate.open()
    handing.join()
    assert handing.found == [0]
    until(wired.is_empty)


def test_an_engine_that_is_lost_while_it_is_handed_to_ends_no_handing_over(wired: Wired) -> None:
    wired.router.prefill(NOTE)
    wired.b.fails["take"] = EngineLostError("gone")
    assert wired.router._core.execution.drain("a") == 0
    wired.b.fails.clear()
    until(lambda: sum(isinstance(event, EngineUp) for event in wired.events.events) == 3)


def test_what_was_released_while_an_engine_was_lost_leaves_it_when_it_is_back(wired: Wired) -> None:
    note, kept = wired.router.prefill(NOTE), wired.router.prefill("Bob has 5 blue boats.")
    wired.a.fails["all"] = EngineLostError("out of reach")
    wired.says("So:", note)
    wired.router.release(note)
    wired.a.fails.clear()
    until(lambda: sum(isinstance(event, EngineUp) for event in wired.events.events) == 3)
    until(lambda: wired.a.held()[0] == 1)
    wired.at, before = "a", wired.router.stats().tokens_recomputed
    assert wired.says("And:", kept) and wired.router.stats().tokens_recomputed == before
    wired.router.release(kept)
    until(wired.is_empty)


def test_a_release_that_does_not_arrive_is_made_up_for(wired: Wired) -> None:
    note = wired.router.prefill(NOTE)
    wired.a.fails["release"] = EngineLostError("out of reach")
    wired.router.release(note)
    until(lambda: sum(isinstance(event, EngineUp) for event in wired.events.events) == 3)
    assert wired.a.held()[0] == 1
    wired.a.fails.clear()
    until(wired.is_empty)


def test_calls_that_cannot_be_placed_fail(wired: Wired) -> None:
    routed(wired.router, lambda *given, **costs: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(EngineFailedError, match="ZeroDivisionError"):
        wired.says("So:")
    assert wired.router.stats().unfinished == 0


def test_what_arrives_while_the_router_closes_stays_nowhere(embedded: LoadedModel) -> None:
    wired = Wired(embedded)
    note = wired.router.prefill(NOTE)
    wired.at, gate = "b", wired.b.hold("take")
    wired.leave("Left:", note)
    assert gate.reached.wait()
    wired.router.release(note)
    closing = Meanwhile(wired.router.close)
    until(lambda: wired.router._core.loop._context.is_closed)
    gate.open()
    closing.join()
    assert wired.a.held() == wired.b.held() == (0, 0, 0)
    for engine in (wired.a, wired.b):
        engine.close()
