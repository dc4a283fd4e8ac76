"""Where a call is run: reckoned by hand, and on random engines compared with all ways there are."""

from __future__ import annotations

from itertools import product

import pytest
from choreo_ray.remote.routing import CallToPlace, Costs, EngineAhead, KVToRead, route
from hypothesis import given
from hypothesis import strategies as st

COSTS = Costs(call_s=0.0, copy_s=0.1, copy_bytes_per_s=1000.0, encode_tokens_per_s=100.0, step_s=0.01, row_s=0.001)
MUCH = 1 << 30


def test_a_call_goes_where_what_it_reads_is() -> None:
    call = CallToPlace([KVToRead("x", 1000, ["b"])], 10, 10)
    found = route(call, [EngineAhead("a", again={"x": 500}, room_bytes=MUCH), EngineAhead("b")], COSTS)
    assert found.engine == "b" and not found.copies and not found.encoded
    assert found.expected_s == pytest.approx(0.1 + 0.1)


def test_kv_is_copied_where_that_takes_less_than_to_encode_it_again() -> None:
    """0.1 s and a second for the bytes, against five; and the engine that has it is busy for ten."""
    call = CallToPlace([KVToRead("x", 1000, ["b"])], 0, 0)
    engines = [EngineAhead("a", again={"x": 500}, room_bytes=MUCH), EngineAhead("b", tokens=1000)]
    found = route(call, engines, COSTS)
    assert (found.engine, found.copies, found.bytes_copied) == ("a", {"x": "b"}, 1000)
    assert found.expected_s == pytest.approx(1.1)


def test_what_is_quick_to_encode_is_encoded_again() -> None:
    call = CallToPlace([KVToRead("x", 1000, ["b"])], 0, 0)
    engines = [EngineAhead("a", again={"x": 50}, room_bytes=MUCH), EngineAhead("b", tokens=1000)]
    found = route(call, engines, COSTS)
    assert (found.engine, found.copies, found.encoded, found.tokens_encoded) == ("a", {}, ("x",), 50)
    assert found.expected_s == pytest.approx(0.5)


def test_past_the_budget_the_call_encodes_again() -> None:
    call = CallToPlace([KVToRead("x", 1000, ["b"]), KVToRead("y", 1000, ["b"])], 0, 0)
    engines = [EngineAhead("a", again={"x": 500, "y": 500}, room_bytes=1500), EngineAhead("b", tokens=5000)]
    found = route(call, engines, COSTS)
    assert found.copies == {"x": "b"} and found.encoded == ("y",) and found.tokens_encoded == 500


def test_two_messages_of_one_engine_are_one_copy() -> None:
    reads = [KVToRead("x", 100, ["b"]), KVToRead("y", 100, ["a", "b"]), KVToRead("z", 100, ["c"])]
    again = {"x": 500, "y": 500, "z": 500}
    found = route(CallToPlace(reads, 0, 0), [EngineAhead("d", again=again, room_bytes=MUCH)], COSTS)
    assert found.copies == {"x": "b", "y": "b", "z": "c"}
    assert found.expected_s == pytest.approx(2 * 0.1 + 0.3)


def test_the_beginning_of_a_copy_is_shared_by_all_that_comes_with_it() -> None:
    """Each of three takes 0.05 s to copy and 0.1 s to encode, so that none alone is worth the 0.1 s of a beginning."""
    reads = [KVToRead(name, 50, ["b"]) for name in "xyz"]
    engines = [EngineAhead("a", again=dict.fromkeys("xyz", 10), room_bytes=MUCH), EngineAhead("b", tokens=1000)]
    found = route(CallToPlace(reads, 0, 0), engines, COSTS)
    assert found.copies == dict.fromkeys("xyz", "b") and found.expected_s == pytest.approx(0.1 + 0.15)
    found = route(CallToPlace(reads[:2], 0, 0), engines, COSTS)
    assert found.encoded == ("x", "y") and found.expected_s == pytest.approx(0.2)


def test_what_is_on_its_way_there_costs_nothing_more() -> None:
    call = CallToPlace([KVToRead("x", 1000, ["b"])], 0, 1)
    engines = [EngineAhead("a", again={"x": 500}, room_bytes=MUCH, incoming=["x"]), EngineAhead("b", rows=1)]
    found = route(call, engines, COSTS)
    assert found.engine == "a" and not found.copies and not found.encoded


def test_a_new_thread_goes_to_the_least_loaded() -> None:
    call = CallToPlace([], 10, 10)
    assert route(call, [EngineAhead("a", rows=1), EngineAhead("b")], COSTS).engine == "b"
    assert route(call, [EngineAhead("a", holds=3), EngineAhead("b", holds=2)], COSTS).engine == "b"
    assert route(call, [EngineAhead("b"), EngineAhead("a")], COSTS).engine == "a"


def test_a_thread_stays_until_load_says_otherwise() -> None:
    """Each row at home adds a tenth to the 0.1 s that it takes elsewhere."""
    engines = [EngineAhead("a"), EngineAhead("home", rows=2)]
    assert route(CallToPlace([], 0, 10, home="home"), engines, COSTS).engine == "home"
    engines = [EngineAhead("a"), EngineAhead("home", rows=4)]
    assert route(CallToPlace([], 0, 10, home="home"), engines, COSTS).engine == "a"
    assert route(CallToPlace([], 0, 10, home="gone"), engines, COSTS).engine == "a"


@given(st.data())
def test_no_other_way_is_quicker(data: st.DataObject) -> None:
    names = ["a", "b", "c"]
    reads = [
        KVToRead(name, data.draw(st.integers(1, 5000)), data.draw(st.lists(st.sampled_from(names), unique=True)))
        for name in ("x", "y", "z")[: data.draw(st.integers(0, 3))]
    ]
    engines = [
        EngineAhead(
            name,
            rows=data.draw(st.integers(0, 9)),
            tokens=data.draw(st.integers(0, 900)),
            again={read.id: data.draw(st.integers(1, 900)) for read in reads},
            room_bytes=MUCH,
        )
        for name in names
    ]
    call = CallToPlace(reads, data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50)))
    found = route(call, engines, COSTS)
    for engine in engines:
        lacking = [read for read in reads if engine.name not in read.holders]
        base = (engine.tokens + call.encodes) / 100 + call.samples * (0.01 + 0.001 * engine.rows)
        for ways in product([None, *names], repeat=len(lacking)):
            if any(way is not None and way not in read.holders for way, read in zip(ways, lacking, strict=True)):
                continue
            copies = sum(read.nbytes for way, read in zip(ways, lacking, strict=True) if way) / 1000
            again = sum(engine.again[read.id] for way, read in zip(ways, lacking, strict=True) if not way) / 100
            sources = 0.1 * len({way for way in ways if way})
            assert found.expected_s <= base + copies + again + sources + 1e-9


@given(st.data())
def test_of_engines_that_lack_the_same_only_the_least_loaded_is_asked(data: st.DataObject) -> None:
    names = [f"engine {number}" for number in range(6)]
    reads = [
        KVToRead(name, data.draw(st.integers(1, 5000)), data.draw(st.lists(st.sampled_from(names[:3]), unique=True)))
        for name in ("x", "y")
    ]
    again = {read.id: data.draw(st.integers(1, 900)) for read in reads}
    engines = [
        EngineAhead(
            name,
            rows=data.draw(st.integers(0, 3)),
            tokens=data.draw(st.sampled_from([0, 100])),
            again=again,
            room_bytes=data.draw(st.sampled_from([0, 2000, MUCH])),
            incoming=data.draw(st.sampled_from([(), ("x",)])),
            holds=data.draw(st.integers(0, 1)),
        )
        for name in names
    ]
    home = data.draw(st.sampled_from([None, *names]))
    call = CallToPlace(reads, 5, data.draw(st.integers(0, 50)), home)
    alone = {engine.name: route(call, [engine], COSTS) for engine in engines}
    best = min(way.expected_s for way in alone.values())
    found = route(call, engines, COSTS)
    assert found == alone[found.engine]
    assert found.expected_s == pytest.approx(best) or found.engine == home
    if home is not None and alone[home].expected_s <= best:
        assert found.engine == home
