"""Handles and names that somebody else has made up."""

from __future__ import annotations

import pytest
from conftest import MakeEngine

from choreo_agents import MessageHandle, Sampling
from choreo_agents.errors import HandleError, UnknownHandleError
from choreo_agents.kv.handle import message_id

TEXT = "Ann has 3 red kites."
LIES = {
    "longer": {"length": 999},
    "shorter": {"length": 1},
    "with an adapter": lambda handle: {"model": f"{handle.model}+0123456789abcdef"},
    "mapped": lambda handle: {"model": f"{handle.model}~0123456789abcdef"},
    "another model's": {"model": "0123456789abcdef"},
}


@pytest.mark.parametrize("lie", LIES)
def test_attack_a_handle_that_lies_about_itself_is_refused(make_engine: MakeEngine, lie: str) -> None:
    engine = make_engine()
    handle = engine.prefill(TEXT)
    said = LIES[lie]
    forged = handle.model_copy(update=said(handle) if callable(said) else said)
    uses = [
        lambda: engine.tokens(forged),
        lambda: engine.prefill(TEXT, [forged]),
        lambda: engine.decode(TEXT, [forged], sampling=Sampling(max_tokens=1)),
        lambda: engine.release(forged),
        lambda: engine.kv.pin(forged),
        lambda: engine.kv.read(forged),
        lambda: engine.kv.lease([forged]),
        lambda: engine.inspect.audit([forged]),
    ]
    for use in uses:
        with pytest.raises(HandleError) as caught:
            use()
        assert lie == "another model's" or isinstance(caught.value, UnknownHandleError)
    assert engine.kv.tiers([forged]) == [None]
    assert engine.tokens(handle) and engine.stats().leases == 1, "the true one is as good as before"


def test_a_handle_that_lies_is_told_what_was_made(make_engine: MakeEngine) -> None:
    engine = make_engine()
    handle = engine.prefill(TEXT)
    with pytest.raises(UnknownHandleError, match=rf"has length=999 .* created with length={handle.length}"):
        engine.tokens(handle.model_copy(update={"length": 999}))


def test_attack_without_a_salt_no_name_can_be_computed(make_engine: MakeEngine) -> None:
    """The key was made of the empty salt: whoever guesses that there is none could name what others said."""
    one, other = make_engine(), make_engine()
    handle = one.prefill(TEXT)
    assert handle.id != other.prefill(TEXT).id
    for salt in (b"", b"choreo", one._tenant.message_ids.encoder().encode()):
        assert message_id(salt, handle.model, one.tokens(handle), [], []) != handle.id
    assert one._tenant.name != other._tenant.name


def test_with_a_salt_names_are_the_same_in_each_engine(make_engine: MakeEngine) -> None:
    one, other = make_engine(salt="s"), make_engine(salt="s")
    assert one.prefill(TEXT) == other.prefill(TEXT) != make_engine(salt="t").prefill(TEXT)


def test_without_a_salt_a_tenancy_that_begins_again_is_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(salt="owner")
    tenant = engine.tenant("")
    named = tenant.prefill(TEXT)
    tenant.close()
    assert engine.tenant("").prefill(TEXT) == named


@pytest.mark.parametrize("salt", ["", "s"])
def test_seeds_are_the_same_in_each_run_with_and_without_a_salt(make_engine: MakeEngine, salt: str) -> None:
    hot = Sampling(temperature=2.0, max_tokens=8, stop_tokens=())
    said = []
    for _ in range(2):
        engine = make_engine(salt=salt)
        parents: list[MessageHandle] = [engine.prefill(TEXT)]
        for _ in range(3):
            parents.append(engine.decode("It is", parents, sampling=hot))
        said.append([engine.tokens(parent) for parent in parents])
        assert engine.tokens(engine.decode("It is", parents[:1], sampling=hot)) != said[-1][1], "a repetition differs"
    assert said[0] == said[1]


def test_seeds_of_long_conversations_need_no_deep_stack(make_engine: MakeEngine) -> None:
    engine = make_engine()
    last = engine.prefill([5])
    for _ in range(1500):
        last = engine.prefill([6], [last], lazy=True, offsets=[0], position=1)
    assert engine._tenant.message_ids.lasting(engine._tenant.find(last).lineage)
