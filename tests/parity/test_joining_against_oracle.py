"""A decode whose view grows while it runs has the logits of the stepwise oracle: before, and from then on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.exact import TOLERANCE
from support.families import FAMILIES, save_tiny
from support.oracle import Oracle, OracleMessage

from choreo_agents import Decode, Engine, Joining, Memory, MessageHandle, Sampling, Scheduling

SERVED = ["llama", "llama-yarn", "mistral", "gemma2", "gemma3_text", "qwen2", "cohere2", "gpt_neox", "gpt_oss", "olmo3"]
Late = tuple[MessageHandle, OracleMessage, int, int]
"""A message, where it is shown, and after how many sampled tokens it is added."""


@pytest.fixture(scope="module", params=SERVED)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param], seed=3)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Oracle:
    return Oracle(model_path)


def draw_tokens(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(3, 360) for _ in range(rng.randint(low, high))]


def adding(joining: Joining, late: Sequence[Late], seen: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Adds what comes late in time, and keeps the logits."""

    def watch(logits: torch.Tensor) -> None:
        for handle, _, offset, after in late:
            if after == len(seen):
                assert joining.add(handle, offset)
        seen.append(logits.detach().clone())

    return watch


def require_close(mine: Sequence[torch.Tensor], theirs: torch.Tensor) -> None:
    error = (torch.stack(list(mine)).float() - theirs).abs().max().item()
    assert error <= TOLERANCE, f"logits differ by {error}"


@pytest.mark.parametrize("seed", range(3))
def test_tokens_see_what_was_there_when_they_were_encoded(model_path: Path, oracle: Oracle, seed: int) -> None:
    rng = random.Random(seed)
    with Engine.load(
        model_path, memory=Memory(kv_budget_bytes=1 << 23), scheduling=Scheduling(step_tokens=rng.choice([512, 9]))
    ) as engine:
        made: list[tuple[MessageHandle, OracleMessage]] = []
        for _ in range(5):
            content, start = draw_tokens(rng, 1, 30), rng.randrange(60)
            made.append((engine.prefill(content, new_offset=start), oracle.encode(content, [], [], start)))
        view, rest = made[:2], made[2:]
        offsets, start = [rng.randrange(60) for _ in view], rng.randrange(150)
        header, said = draw_tokens(rng, 1, 12), draw_tokens(rng, 12, 20)
        late = [(*message, rng.randrange(150), rng.randrange(len(said) - 1)) for message in rest]
        late.sort(key=lambda each: each[3])
        logits: list[torch.Tensor] = []
        joining = engine.branches.joining()
        call = Decode(
            header,
            [handle for handle, _ in view],
            offsets,
            start,
            Sampling(forced=tuple(said)),
            watch=adding(joining, late, logits),
            joining=joining,
        )
        [handle] = engine.decode([call])
        assert engine.inspect.joined(handle) == {each[0]: len(header) + each[3] for each in late}
        wanted = oracle.encode(
            header + said,
            [message for _, message in view] + [each[1] for each in late],
            [*offsets, *(each[2] for each in late)],
            start,
            [0, 0, *(len(header) + each[3] for each in late)],
        )
        require_close(logits, oracle.logits(wanted)[len(header) - 1 : -1])
        for lost in (False, True):
            if lost:
                engine.kv.park()
                assert engine.stats().kv_bytes == 0
            probed: list[torch.Tensor] = []
            probe = Decode([7], [handle], [5], sampling=Sampling(forced=(8, 9)), watch=probed.append)
            [reader] = engine.decode([probe])
            end = 5 + len(wanted.tokens)
            require_close(probed, oracle.logits(oracle.encode([7, 8, 9], [wanted], [5], end))[:-1])
            engine.release(reader)
        assert engine.stats().recomputed == len(made) + 1, "the message, and what it saw from the start on or later"
        engine.check()
