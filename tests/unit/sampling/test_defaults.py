"""What a checkpoint says about sampling, and what of it a call takes."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from choreo_agents.sampling import Sampling, checkpoint_sampling


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, {}),
        ({"do_sample": None, "temperature": None, "max_new_tokens": 9, "eos_token_id": [1, 2]}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "min_p": 0.05, "top_k": -1}, {"temperature": 1.0, "min_p": 0.05, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
    ids=str,
)
def test_what_transformers_would_do_is_the_default(said: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Without `do_sample` its `generate` draws nothing, whatever temperature stands beside it."""
    found = checkpoint_sampling(said)
    assert found.model_dump(exclude_unset=True) == wanted


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"temperature": -1.0}, {"top_k": "many"}, {"min_p": 2}], ids=str)
def test_a_value_that_no_decode_can_use_is_left_out_and_said(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = checkpoint_sampling({"do_sample": True, "repetition_penalty": 1.2} | wrong)
    [name] = wrong
    assert found.model_fields_set == {"temperature", "repetition_penalty"} - {name}
    assert f"{name}={wrong[name]!r}" in caplog.text


def test_what_a_call_sets_is_its_own_even_if_it_is_the_usual() -> None:
    defaults = Sampling(temperature=0.6, top_k=20)
    assert Sampling().with_defaults(defaults).model_dump(exclude_unset=True) == {"temperature": 0.6, "top_k": 20}
    greedy = Sampling(temperature=0.0).with_defaults(defaults)
    assert (greedy.temperature, greedy.top_k) == (0.0, 20)
    kept = Sampling(top_k=0, max_tokens=7).with_defaults(defaults)
    assert (kept.temperature, kept.top_k, kept.max_tokens) == (0.6, 0, 7)
    changed = Sampling(max_tokens=7).model_copy(update={"seed": 3}).with_defaults(defaults)
    assert (changed.temperature, changed.seed) == (0.6, 3)
    own = Sampling()
    assert own.with_defaults(Sampling()) is own
