"""What the requests of a step are called in a recording: the same whoever came first, and no two alike."""

from __future__ import annotations

from collections.abc import Sequence

from conftest import MakeEngine

from choreo_agents import Decode, Engine, Prefill, Sampling
from choreo_agents.engine import PlayedCall
from choreo_agents.engine.recording import StepNames

SAYING = Sampling(temperature=1.0, max_tokens=3, seed=3)


def names(engine: Engine, authors: Sequence[str], places: Sequence[str]) -> list[str]:
    """Of all requests, when these ask for one message one after the other, and then speak over it."""
    named, found = StepNames(engine.record.digests(b"key")), set[str]()
    engine._core.loop.planner.watch = lambda rows: found.update(named(request) for request, _ in rows)
    views = [engine.prefill("Be brief.", author=author, lazy=True) for author in authors]
    engine.decode([Decode("Ann:", views[:1], sampling=SAYING, played=PlayedCall(place)) for place in places])
    return sorted(found)


def test_who_asked_first_is_no_matter(make_engine: MakeEngine) -> None:
    one, other = (names(make_engine(), authors, ["ann 1 0 0"]) for authors in (("ann", "bob"), ("bob", "ann")))
    assert one == other and len(one) == 2


def test_calls_over_an_equal_view_have_names_of_their_own(make_engine: MakeEngine) -> None:
    places = ["ann 1 0 0", "ann 1 1 0"]
    one, other = (names(make_engine(), ["ann"], order) for order in (places, places[::-1]))
    assert one == other and len(one) == 3


def test_words_are_told_apart_that_are_encoded_for_their_readers_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    named, found = StepNames(engine.record.digests(b"key")), set[str]()
    engine._core.loop.planner.watch = lambda rows: found.update(named(request) for request, _ in rows)
    views = engine.prefill([Prefill(f"Box {box}.", author="ann", lazy=True) for box in "AB"])
    engine.decode("Ann:", views, sampling=SAYING)
    assert len(found) == 3
