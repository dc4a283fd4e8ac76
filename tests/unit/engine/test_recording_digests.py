"""Digests of a recording: equal for equal things in any engine, under one key and no other."""

from __future__ import annotations

from conftest import MakeEngine

from choreo_agents import Engine, MessageHandle
from choreo_agents.engine.recording.recorder import Digests


def request(engine: Engine, key: bytes, words: str, *, told: str = "Be brief.", seed: int = 0) -> dict[str, str]:
    root = engine.prefill(told)
    seen: list[MessageHandle] = [engine.prefill(words, [root]), root]
    return Digests(key).request(engine.record.messages(seen), [4, 0], 30, {"turn": ["x"], "seed": seed})


def test_a_request_has_one_digest_in_all_engines_with_the_key(make_engine: MakeEngine) -> None:
    one, other = make_engine(), make_engine(salt="s", seed=4)
    assert request(one, b"key", "Ann.") == request(other, b"key", "Ann.")
    assert request(one, b"key", "Ann.") != request(one, b"another", "Ann.")
    assert request(one, b"key", "Ann.") != request(one, b"key", "Bob.")
    # Equal words that have attended to something else are another message.
    assert request(one, b"key", "Ann.", told="Be kind.") != request(one, b"key", "Ann.")


def test_each_part_of_a_request_has_a_digest_of_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one = request(engine, b"key", "Ann.")
    assert one.keys() == {"view", "turn", "seed"}
    for other, differs in (
        (request(engine, b"key", "Bob."), "view"),
        (request(engine, b"key", "Ann.", seed=1), "seed"),
    ):
        assert {part for part in one if one[part] != other[part]} == {differs}


def test_moving_a_whole_view_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seen, digests = engine.record.messages([engine.prefill("Ann.")]), Digests(b"key")
    assert digests.request(seen, [0], 10, {}) == digests.request(seen, [5], 15, {})
    assert digests.request(seen, [0], 10, {}) != digests.request(seen, [1], 10, {})


def test_long_conversations_need_no_recursion(make_engine: MakeEngine) -> None:
    engine = make_engine()
    last = engine.prefill("A", lazy=True)
    for _ in range(1500):
        last = engine.prefill("A", [last], offsets=[0], position=9, lazy=True)
    assert Digests(b"key").request(engine.record.messages([last]), [0], 9, {}).keys() == {"view"}
