"""Competitors do the work that they are timed for: what they would say is what Hugging Face says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from choreo_bench.competitors import HuggingFace, Ours
from choreo_bench.competitors.base import paths
from choreo_bench.experiments.bench_engine.measure import SCENARIOS, scenarios_named
from transformers import AutoModelForCausalLM

from choreo_agents.models import LoadedModel


def test_branches_are_spread_over_the_leaves() -> None:
    levels = [[[1]], [[2], [3]]]
    assert paths(levels, 4) == [((0, 0), (1, 0)), ((0, 0), (1, 0)), ((0, 0), (1, 1)), ((0, 0), (1, 1))]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_every_scenario_can_be_spread_and_drawn(scenario) -> None:
    [small] = [each for each in scenarios_named((), 0.01) if each.name == scenario.name]
    drawn = small.drawn()
    assert [tuple(len(tokens) for tokens in level) for level in drawn] == list(small.levels)
    assert drawn == small.drawn() != small.drawn(1)
    if small.is_decode:
        assert all(small.branches % len(level) == 0 for level in small.levels)
    else:
        assert sorted(small.order) == list(range(len(small.levels[0])))
    assert scenario.tokens() < scenario.copied_tokens() or scenario.branches < 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_a_prefix_cache_reuses_what_stands_in_its_place(
    tiny_path: Path, cache, order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timed: the tokens after the common prefix, all of them, and no others; the answer is the model's own."""
    messages, new = [[5] * 9, [6] * 7, [7] * 11], [8, 9]
    competitor = HuggingFace(tiny_path, torch.float32, cache)
    timer = competitor.first_token(messages, order, new)
    seen: list[int] = []
    said: list[int] = []
    forward = competitor._model.forward

    def watched(*args, **kwargs):
        seen.append(kwargs["input_ids"].shape[1])
        out = forward(*args, **kwargs)
        said.append(int(out.logits[0, -1].argmax()))
        return out

    monkeypatch.setattr(competitor._model, "forward", watched)
    assert timer() > 0 and timer() > 0
    common = {(0, 1, 2): 27, (0, 2, 1): 9, (2, 0, 1): 0}[order]
    assert seen == [29 - common] * 2
    plain = AutoModelForCausalLM.from_pretrained(tiny_path)
    prompt = [token for index in order for token in messages[index]] + new
    with torch.inference_mode():
        assert said == [int(plain(torch.tensor([prompt])).logits[0, -1].argmax())] * 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decode_steps_follow_each_branchs_own_prompt(tiny_path: Path, cache, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [[[5, 6, 7, 8]], [[9, 10], [11, 12]]]
    competitor = HuggingFace(tiny_path, torch.float32, cache)
    timer = competitor.decode(levels, 4, 3)
    said: list[list[int]] = []
    forward = competitor._model.forward

    def watched(*args, **kwargs):
        out = forward(*args, **kwargs)
        said.append(out.logits[:, -1].argmax(-1).tolist())
        return out

    monkeypatch.setattr(competitor._model, "forward", watched)
    timer()
    assert len(said) == 4
    plain = AutoModelForCausalLM.from_pretrained(tiny_path)
    for row, tail in enumerate([[9, 10, 3], [9, 10, 4], [11, 12, 5], [11, 12, 6]]):
        prompt = torch.tensor([[5, 6, 7, 8, *tail]])
        wanted = plain.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
        assert [step[row] for step in said] == wanted.tolist()


def test_the_engines_own_timers_leave_no_message_but_the_shared(tiny: LoadedModel) -> None:
    ours = Ours(tiny, 4096)
    first = ours.first_token([[5] * 9, [6] * 7], (1, 0), [8, 9])
    decode = ours.decode([[[5, 6, 7, 8]], [[9, 10], [11, 12]]], 4, 3)
    assert first() > 0 and decode() > 0 and decode() > 0
    assert ours._engine.stats().messages == 2 + 3
    ours._engine.check()
    ours.close()
