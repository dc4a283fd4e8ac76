"""What a router knows of its engines when it places a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from choreo_ray.remote import Costs, HelloReply
from choreo_ray.remote.fleet import Fleet, PlacementRequest
from choreo_ray.remote.protocol import missing_lineage
from choreo_ray.remote.routing import CallToPlace, EngineAhead, Route, route
from hypothesis import given
from hypothesis import strategies as st
from remote_support.loopback import Routing

from choreo_agents.engine.messages.message import Lineage, Message, Placement, Scope, Usage
from choreo_agents.kv.handle import MessageHandle

NAMES = ("a", "b", "c")


def message(number: int, tokens: int, parents: Sequence[Message] = ()) -> Message:
    """A message of so many tokens."""
    lineage = Lineage((0,) * tokens, tuple(parents), Placement((0,) * len(parents), 0))
    handle = MessageHandle(id=f"{number:032x}", model="m", length=tokens)
    return Message(handle, lineage, None, None, Usage(0, 0, None, 0.0))


def fleet(
    seen: list[tuple[CallToPlace, Sequence[EngineAhead]]], copied_bytes: int = 1 << 20, routing: Routing = route
) -> Fleet:
    """Three engines; what their routing is told is written down."""

    def told(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
        seen.append((call, engines))
        return routing(call, engines, costs)

    engines: Any = [SimpleNamespace(name=name) for name in NAMES]
    costs = Costs(copy_s=1e-4, encode_tokens_per_s=4e3)
    made: Any = Fleet(engines, costs, bytes_per_token=8, copied_bytes=copied_bytes)
    made._route = partial(told, costs=costs)
    served: Any = None
    for name in NAMES:
        made.came(name, HelloReply(served, 0, 0, {}), lambda message_id: True)
    return made  # type: ignore[no-any-return]


def wish(number: int, parents: Sequence[Message], own: int = 3) -> PlacementRequest:
    """A call that reads these."""
    return PlacementRequest(number, parents, own, "", object(), None, None)


@given(st.data())
def test_what_is_encoded_again_is_counted_for_each_engine(data: st.DataObject) -> None:
    known: list[Message] = []
    for number in range(data.draw(st.integers(1, 8))):
        parents = data.draw(st.lists(st.sampled_from(known), unique_by=id, max_size=3)) if known else []
        known.append(message(number, data.draw(st.integers(1, 9)), parents))
    seen: list[tuple[CallToPlace, Sequence[EngineAhead]]] = []
    engines = fleet(seen)
    held = {name: data.draw(st.lists(st.sampled_from(known), unique_by=id)) for name in NAMES}
    for name in NAMES:
        engines.holds(name, {each.handle.id: "salt" for each in held[name]})
    read = data.draw(st.lists(st.sampled_from(known), unique_by=id, min_size=1))
    engines.place(wish(0, read))
    [(call, ahead)] = seen
    assert [each.nbytes for each in call.reads] == [8 * len(each.tokens) for each in read]
    for engine in ahead:
        there = {each.handle.id for each in held[engine.name]}
        for parent in read:
            behind = missing_lineage([parent], there)
            assert engine.again.get(parent.handle.id, 0) == sum(len(each.tokens) for each in behind)
            there |= {each.handle.id for each in behind}


def test_what_a_call_brings_is_counted_once() -> None:
    seen: list[tuple[CallToPlace, Sequence[EngineAhead]]] = []
    engines, document = fleet(seen), message(0, 1000)
    placed = engines.place(wish(0, [document]))
    assert placed is not None and placed.tokens_encoded == 1000 and placed.encoded == (document.handle.id,)
    again = engines.place(wish(1, [document]))
    assert again is not None and again.engine == placed.engine and not again.tokens_encoded
    engines.ended(placed.engine, 0)
    elsewhere = {engine.name: engine for engine in seen[-1][1]}
    assert elsewhere[placed.engine].tokens == 1003 and not elsewhere[placed.engine].again


def test_what_is_on_its_way_to_an_engine_is_bounded_together() -> None:
    def apart(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
        return route(call, [engine for engine in engines if engine.name == "b"], costs)

    # 600 of 1,000 bytes, of which a token has 8.
    engines = fleet([], copied_bytes=1000, routing=apart)
    documents = [message(number, 75) for number in range(2)]
    engines.holds("a", {each.handle.id: "salt" for each in documents})
    placed = [engines.place(wish(number, [each])) for number, each in enumerate(documents)]
    assert [each.bytes_copied for each in placed if each is not None] == [600, 0]
    engines.arrived("b", 0)
    engines.ended("b", 1)
    again = engines.place(wish(2, [documents[1]]))
    assert again is not None and again.bytes_copied == 600, "there is room once the first has arrived"


def test_a_threads_calls_stay_together_and_move_with_it() -> None:
    thread, other, where = Scope(None, is_threads=True), Scope(None, is_threads=True), ["c"]

    def routing(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
        homes.append(call.home)
        return Route(where[0], {}, (), 0, 0, 0.0)

    homes: list[str | None] = []
    engines = fleet([], routing=routing)
    for number, (scope, place) in enumerate([(thread, "c"), (thread, "b"), (other, "a"), (thread, "b"), (other, "a")]):
        where[0] = place
        engines.place(PlacementRequest(number, (), 3, "", object(), None, scope))
    assert homes == [None, "c", None, "b", "a"]


def test_what_is_on_its_way_to_an_engine_is_not_to_be_had_there_yet() -> None:
    engines, document = fleet([]), message(0, 1000)
    placed = engines.place(wish(0, [document]))
    assert placed is not None
    engines.holds(placed.engine, {document.handle.id: "salt"})
    assert not engines.holders(document.handle.id)
    engines.encoded(placed.engine, 0)
    assert engines.holders(document.handle.id) == [placed.engine], "with its first token a call has all that it reads"
