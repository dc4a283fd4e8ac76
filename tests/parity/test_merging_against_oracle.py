"""What a synthesizer hears of branches that are merged in parallel: the stepwise oracle's logits, in any order."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import pytest
import torch
from support.exact import TOLERANCE
from support.families import FAMILIES, save_tiny
from support.oracle import Oracle, require_same_tokens
from torch import Tensor

from choreo_agents import Decode, Engine, Memory, MessageHandle, Prefill, Sampling

SERVED = ("llama", "qwen3", "gpt_neox", "cohere2", "gemma2", "smollm3", "gpt_oss")


@pytest.fixture(scope="module", params=SERVED)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param], seed=3)


def draw(seed: int, *counts: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 360) for _ in range(count)] for count in counts]


async def heard(engine: Engine, branches: list[MessageHandle], asked: list[int], rest: list[int]) -> Tensor:
    """The logits before each token of what is said about branches, [tokens, vocabulary]."""
    seen: list[Tensor] = []
    view = await engine.branches.aview(branches, asked)
    forced = Sampling(forced_token_ids=tuple(rest))
    watch = lambda logits: seen.append(logits.clone())  # noqa: E731
    made = await engine.adecode([Decode([9], view.handles, view.offsets, view.end, forced, logits_callback=watch)])
    for handle in (*made, *view.owned):
        engine.release(handle)
    return torch.stack(seen)


def test_branches_in_parallel_are_heard_alike_in_any_order(model_path: Path) -> None:
    root, *tails, asked, rest = draw(1, 24, 17, 5, 22, 4, 7)
    oracle = Oracle(model_path)
    top = oracle.encode(root, [], [], 0)
    seen = [top, *(oracle.encode(tail, [top], [0], 24) for tail in tails)]
    question = oracle.encode(asked, seen, [0, 24, 24, 24], 46)
    wanted = oracle.logits(oracle.encode([9, *rest], [*seen, question], [0, 24, 24, 24, 46], 50))[:-1]
    with Engine.load(model_path, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        parent = engine.prefill(root)
        branches = engine.prefill([Prefill(tail, [parent]) for tail in tails])
        found = [asyncio.run(heard(engine, list(order), asked, rest)) for order in itertools.permutations(branches)]
        engine.check()
    most = wanted.abs().max().item()
    assert (found[0] - wanted).abs().max() <= TOLERANCE
    for other in found[1:]:
        assert (other - found[0]).abs().max() <= 1e-5 * max(1.0, most)


def test_text_says_greedily_what_hugging_face_says_of_the_concatenation(model_path: Path) -> None:
    root, one, two, asked = draw(2, 20, 12, 9, 4)
    wanted, logits = Oracle(model_path).generate([*root, *one, *two, *asked, 9], 12)
    with Engine.load(model_path, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        parent = engine.prefill(root)
        branches = engine.prefill([Prefill(tail, [parent]) for tail in (one, two)])
        said = engine.branches.merge(
            branches, asked, strategy="text", header=[9], sampling=Sampling(max_tokens=12, stop_tokens=())
        )
        require_same_tokens(engine.tokens(said)[1:13], wanted, logits)
