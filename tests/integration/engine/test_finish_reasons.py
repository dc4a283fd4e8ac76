"""Why a decode has ended, as the engine tells of its message."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import MakeEngine

from choreo_agents import Constraint, Engine, Sampling, Thinking
from choreo_agents.testing import Script


def made(engine: Engine, **options: Any) -> Any:
    sampling = options.pop("sampling", Sampling())
    return engine.decode(engine.chat.header("ann"), sampling=sampling, turn_suffix=engine.chat.turn_end, **options)


@pytest.fixture
def scripted() -> Any:
    with Script(default="One two three.").load() as engine:
        yield engine


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(), "stop"),
        (Sampling(max_tokens=3), "length"),
        (Sampling(stop=("two",)), "stop"),
        (Sampling(choices=("One two three.", "Two.")), "stop"),
        (Sampling(stop_tokens=(), max_tokens=9), "length"),
    ],
)
def test_it_has_ended_by_itself_or_was_cut(scripted: Engine, sampling: Sampling, reason: str) -> None:
    handle = made(scripted, sampling=sampling)
    assert scripted.inspect.finish_reason(handle) == reason
    assert scripted.inspect.records([handle])[-1].finish_reason == reason


def test_a_text_to_stop_at_ends_the_last_token_that_may_be_sampled_too(scripted: Engine) -> None:
    longest = len(scripted.logprobs(made(scripted, sampling=Sampling(stop=("two",)))))
    handle = made(scripted, sampling=Sampling(stop=("two",), max_tokens=longest))
    assert scripted.inspect.finish_reason(handle) == "stop"


def test_a_replay_says_what_it_replays(scripted: Engine) -> None:
    for sampling in (
        Sampling(),
        Sampling(max_tokens=3),
        Sampling(stop=("two",)),
        Sampling(choices=("One two three.",)),
    ):
        handle = made(scripted, sampling=sampling)
        reason = scripted.inspect.finish_reason(handle)
        sampled = tuple(each.token for each in scripted.logprobs(handle))
        scripted.release(handle)
        again = made(scripted, sampling=sampling.model_copy(update={"forced_token_ids": sampled}))
        assert scripted.inspect.finish_reason(again) == reason
        scripted.release(again)
    silent = made(scripted, sampling=Sampling(forced_token_ids=()))
    assert scripted.inspect.finish_reason(silent) == "stop"


@pytest.mark.parametrize(
    ("constraint", "most", "reason"),
    [
        ({"regex": " ?One two"}, 2, "stop"),
        ({"regex": " ?One two( three.)?"}, 2, "length"),
        ({"regex": " ?One two"}, 3, "stop"),
        (None, 2, "stop"),
        (None, 3, "length"),
    ],
)
@pytest.mark.parametrize("method", ["choreo", "naive"])
def test_a_replay_of_an_answer_that_is_led_ends_as_the_answer_did(
    method: str, constraint: Any, most: int, reason: str
) -> None:
    """A constraint ends it with the last token that there may be, or that token does."""
    own = None if constraint else Constraint("two", lambda _, ends: Two())
    sampling = Sampling(max_tokens=most, constraint=constraint)
    if most == 3 and own is not None:
        own = Constraint("any", lambda _, ends: Two(last=9))
    with Script(default="One two" if constraint and most == 3 else "One two three.").load(method=method) as engine:
        thinking = Thinking.of(engine.chat, "ann", 4)
        for thinks in (None, thinking):
            handle = made(engine, sampling=sampling, constraint=own, thinking=thinks)
            found = engine.inspect.finish_reason(handle)
            decoded = next(iter(engine.inspect.thoughts(handle, "ann")), None) or handle
            *_, record = engine.inspect.records([decoded])
            sampled = tuple(record.tokens[slice(*record.sampled or (0, 0))])
            engine.release(handle)
            forced = sampling.model_copy(update={"forced_token_ids": sampled})
            again = made(engine, sampling=forced, constraint=own, thinking=thinks)
            assert (found, engine.inspect.finish_reason(again)) == (reason, reason)
            engine.release(again)


class Two:
    """A constraint of so many tokens, whatever they are."""

    def __init__(self, last: int = 2) -> None:
        self._left = last

    @property
    def done(self) -> bool:
        return self._left == 0

    def allowed(self) -> None:
        return None

    def take(self, token: int) -> None:
        self._left -= 1


def test_tokens_that_a_guide_would_not_say_are_replayed_and_are_cut(scripted: Engine) -> None:
    forced = tuple(scripted.model.encode("One two"))
    for constraint in ({"regex": "[0-9]{9}"}, {"regex": "One two three"}, {"regex": "One"}):
        handle = made(
            scripted, sampling=Sampling(max_tokens=len(forced), constraint=constraint, forced_token_ids=forced)
        )
        assert scripted.inspect.finish_reason(handle) == "length"
        scripted.release(handle)


def test_what_was_not_decoded_has_none(scripted: Engine) -> None:
    told = scripted.prefill(scripted.chat.turn("user", "Well?"))
    assert scripted.inspect.finish_reason(told) is None


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
def test_a_call_that_is_known_says_it_again(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(method=method)
    cut = Sampling(max_tokens=3, stop_tokens=())
    handles = [made(engine, sampling=cut, idempotency_key="call") for _ in range(2)]
    assert handles[0] == handles[1] and engine.inspect.finish_reason(handles[1]) == "length"


def test_equal_words_say_how_the_latest_have_ended(scripted: Engine) -> None:
    whole = made(scripted)
    longest = len(scripted.logprobs(whole))
    ends = scripted.inspect.finish_reason(whole)
    cut = made(scripted, sampling=Sampling(max_tokens=longest - 1, stop_tokens=()))
    assert cut == whole and (ends, scripted.inspect.finish_reason(whole)) == ("stop", "length")
