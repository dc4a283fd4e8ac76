"""Rules for placing calls: each where it decides otherwise than the product's, and where it does not."""

from __future__ import annotations

from dataclasses import replace

from choreo_agents.engine.elsewhere import CallToPlace, Costs, EngineAhead, Route
from choreo_agents.engine.elsewhere.routing import KVToRead
from choreo_agents.lab.simulating.rules import RULES

COSTS = Costs(call_s=0.0, copy_s=0.01, copy_bytes_per_s=1e6, encode_tokens_per_s=1000.0, step_s=0.01, row_s=0.001)
"""A call of 100 samples takes a second where nothing else is to be done."""
CALL = CallToPlace(reads=(), encodes=0, samples=100.0)
ROOM = 1 << 30
DOCUMENT = KVToRead("doc", nbytes=100_000, holders=("far",))
"""Copied in 0.11 s, encoded again in 0.5."""


def engine(name: str, tokens: int = 0) -> EngineAhead:
    """With so many tokens, each a millisecond, to encode before anything else; it lacks the document."""
    return EngineAhead(name, tokens=tokens, again={"doc": 500}, room_bytes=ROOM)


def placed(rule: str, call: CallToPlace, *engines: EngineAhead) -> Route:
    """Where a rule has a call run."""
    return RULES[rule](call, engines, COSTS)


def where(call: CallToPlace, *engines: EngineAhead) -> dict[str, str]:
    """The same of every rule."""
    return {rule: placed(rule, call, *engines).engine for rule in RULES}


def test_no_home_leaves_an_engine_for_one_that_is_a_little_quicker() -> None:
    """Home takes a fifth longer."""
    found = where(replace(CALL, home="home"), engine("home", 200), engine("idle"))
    assert found["route"] == "home" and found["no-home"] == "idle"


def test_stays_leaves_its_engine_for_none() -> None:
    """Home takes three times as long; who has none, or has lost it, goes where the product says."""
    at_home = replace(CALL, home="home")
    found = where(at_home, engine("home", 2000), engine("idle"))
    assert found["route"] == "idle" and found["stays"] == "home"
    assert placed("stays", CALL, engine("home", 2000), engine("idle")).engine == "idle"
    assert placed("stays", at_home, engine("full", 2000), engine("idle")).engine == "idle"


def test_least_loaded_looks_at_nothing_but_what_is_to_be_done() -> None:
    """What has the document is quicker than the idle one, which has it copied; by tokens first, then by rows."""
    reading = replace(CALL, reads=(DOCUMENT,))
    found = where(reading, engine("far", 50), engine("idle"))
    assert found["route"] == "far" and found["least-loaded"] == "idle"
    assert placed("least-loaded", reading, engine("far", 50), engine("idle")).copies == {"doc": "far"}
    by_rows = where(reading, replace(engine("far"), rows=1), engine("idle"))
    assert by_rows["route"] == "far" and by_rows["least-loaded"] == "idle"


def test_most_held_goes_to_what_a_call_reads_however_long_that_takes() -> None:
    """Most are bytes, not messages."""
    small = [KVToRead(name, nbytes=1_000, holders=("idle",)) for name in ("one", "two")]
    found = where(replace(CALL, reads=(DOCUMENT, *small)), engine("far", 2000), engine("idle"))
    assert found["route"] == "idle" and found["most-held"] == "far"


def test_no_copies_encodes_again_what_would_be_copied() -> None:
    reading = replace(CALL, reads=(DOCUMENT,))
    ours, none = (placed(rule, reading, engine("far", 2000), engine("idle")) for rule in ("route", "no-copies"))
    assert (ours.engine, ours.copies, ours.tokens_encoded) == ("idle", {"doc": "far"}, 0)
    assert (none.engine, none.copies, none.tokens_encoded) == ("idle", {}, 500)


def test_the_product_comes_first_of_the_rules() -> None:
    assert [*RULES] == ["route", "no-home", "stays", "least-loaded", "most-held", "no-copies"]
