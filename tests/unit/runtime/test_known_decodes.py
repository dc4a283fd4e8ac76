"""Decodes whose tokens are known: taken in one by one, or encoded at once."""

from __future__ import annotations

import pytest
from conftest import MakeEngine

from choreo_agents import Sampling
from choreo_agents.engine import PlayedCall
from choreo_agents.engine.calls import StreamedToken
from choreo_agents.models import LoadedModel
from choreo_agents.runtime.step_trace import StepTrace


@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": 20},
        {"max_tokens": 3},
        {"max_tokens": 40, "temperature": 0.0},
        {"choices": ("Yes", "No"), "max_tokens": 9},
        {"stop": ("a",), "max_tokens": 40},
    ],
    ids=str,
)
def test_known_tokens_make_the_message_that_they_made(
    make_engine: MakeEngine, embedded: LoadedModel, asked: dict[str, object]
) -> None:
    """The same handle, ended for the same reason, and streamed alike; encoded at once, no step samples."""
    engine = make_engine(embedded, kv_budget_bytes=1 << 25)
    view = engine.prefill("Ann has 3 red kites.")
    sampling, end = Sampling(**{"temperature": 1.0, "seed": 3} | asked), engine.chat.turn_end  # type: ignore[arg-type]
    first = engine.decode("Bob:", [view], sampling=sampling, turn_suffix=end)
    tokens, reason = tuple(each.token for each in engine.logprobs(first)), engine.inspect.finish_reason(first)
    before = engine.stats()
    known = PlayedCall("bob 1 0 0", tokens, at_once=True)
    *streamed, handle = engine.stream("Bob:", [view], sampling=sampling, turn_suffix=end, played=known)
    assert handle == first and engine.inspect.finish_reason(handle) == reason
    assert tuple(each.token for each in streamed if isinstance(each, StreamedToken)) == tokens
    assert engine.stats().decode_steps == before.decode_steps
    assert engine.stats().tokens_encoded - before.tokens_encoded <= first.length
    other = sampling.model_copy(update={"seed": 99})
    again = engine.decode("Bob:", [view], sampling=other, turn_suffix=end, played=PlayedCall("bob 1 0 0", tokens))
    assert again == first and engine.inspect.finish_reason(again) == reason
    assert engine.stats().decode_steps >= before.decode_steps + len(tokens)


def test_forced_words_are_taken_at_once_as_they_are(make_engine: MakeEngine) -> None:
    engine = make_engine()
    forced = Sampling(forced_token_ids=(40, 41, 42), choices=("Yes", "No"))
    handle = engine.decode("Bob:", sampling=forced, played=PlayedCall("bob 1 0 0", at_once=True))
    assert engine.tokens(handle)[-3:] == [40, 41, 42] and engine.stats().decode_steps == 0


def test_calls_over_an_equal_view_are_told_apart_by_their_place(make_engine: MakeEngine) -> None:
    """So a timetable names each by itself, whoever comes first."""
    names: list[set[str]] = []
    for places in (("ann 1 0 0", "ann 1 1 0"), ("ann 1 1 0", "ann 1 0 0"), ("ann 1 0 0", "ann 1 0 0")):
        step_trace = StepTrace()
        engine = make_engine(step_trace=step_trace)
        for place in places:
            engine.decode("Ann:", sampling=Sampling(max_tokens=2), author="ann", played=PlayedCall(place))
        names.append({name for step in step_trace.steps for (name, _), _ in step})
    assert names[0] == names[1] and len(names[0]) == 2 and len(names[2]) == 1
