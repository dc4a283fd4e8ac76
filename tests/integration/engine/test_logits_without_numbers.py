"""Passes that go wrong without a word: logits that hold no number say nothing, and nobody is told that they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from choreo_agents import Decode, Engine, Memory, Sampling
from choreo_agents.errors import EngineFailedError
from choreo_agents.models import LoadedModel

SPEECH = {
    "likeliest": Sampling(max_tokens=6, stop_tokens=()),
    "drawn": Sampling(temperature=1.0, max_tokens=6, stop_tokens=(), seed=3),
    "filtered": Sampling(temperature=1.0, top_k=5, top_p=0.9, max_tokens=6, stop_tokens=(), seed=3),
    "penalised": Sampling(temperature=1.0, presence_penalty=0.5, max_tokens=6, stop_tokens=(), seed=3),
    "of some": Sampling(temperature=1.0, max_tokens=6, choices=("ABC", "BCA"), seed=3),
}


def spoil(engine: Engine, spoils: Callable[[int], bool], value: float) -> None:
    """Have the last row of some passes hold nothing but this."""
    executor: Any = engine._core.loop.executor
    compute, passes = executor.logits, [0]

    def spoiled(*args: Any) -> torch.Tensor:
        logits: torch.Tensor = compute(*args).clone()
        passes[0] += 1
        if len(logits) and spoils(passes[0]):
            logits[-1] = value
        return logits

    executor.logits = spoiled


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("speech", SPEECH)
def test_a_pass_without_numbers_is_run_again_or_fails(tiny: LoadedModel, speech: str, value: float) -> None:
    call = Decode("<|assistant|> ann:", author="ann", sampling=SPEECH[speech])
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
        [said] = engine.decode([call])
        wanted = engine.text(said)
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
        spoil(engine, lambda number: number == 3, value)
        [said] = engine.decode([call])
        assert engine.text(said) == wanted
        engine.check()
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
        spoil(engine, lambda number: number > 2, value)
        with pytest.raises(EngineFailedError, match="NaN or infinite"):
            engine.decode([call])
        engine.check()
        assert not engine.stats().messages


def test_others_of_the_step_go_on(tiny: LoadedModel) -> None:
    calls = [Decode(f"<|assistant|> {name}:", author=name, sampling=SPEECH["drawn"]) for name in ("ann", "bob")]
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
        wanted = [engine.text(said) for said in engine.decode(calls)]
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
        spoil(engine, lambda number: number == 3, float("nan"))
        assert [engine.text(said) for said in engine.decode(calls)] == wanted
