"""The engine's logits over choreographed views equal the stepwise oracle's, to 1e-4 in fp32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.exact import TOLERANCE
from support.families import FAMILIES, save_tiny
from support.oracle import Oracle, OracleMessage, require_same_tokens

from choreo_agents import Decode, Engine, Memory, MessageHandle, Prefill, Sampling, Scheduling
from choreo_agents.models import LoadedModel, load_model


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param], seed=3)


@pytest.fixture(scope="module")
def model(model_path: Path) -> LoadedModel:
    return load_model(model_path)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Oracle:
    return Oracle(model_path)


def draw_tokens(rng: random.Random, low: int = 1, high: int = 40) -> list[int]:
    return [rng.randrange(3, 360) for _ in range(rng.randint(low, high))]


def forced(tokens: list[int], seed: int) -> Sampling:
    return Sampling(forced_token_ids=tuple(tokens), seed=seed)


def require_close(mine: list[torch.Tensor], theirs: torch.Tensor) -> None:
    error = (torch.stack(mine).float() - theirs).abs().max().item()
    assert error <= TOLERANCE, f"logits differ by {error}"


@pytest.mark.parametrize("prompt_length", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 17)), 150])
def test_greedy_decode_equals_hugging_face_generate(model: LoadedModel, oracle: Oracle, prompt_length: int) -> None:
    prompt = draw_tokens(random.Random(prompt_length), prompt_length, prompt_length)
    wanted, logits = oracle.generate(prompt, 24)
    for step_tokens in (512, 7):
        with Engine.load(
            model, memory=Memory(kv_budget_bytes=1 << 23), scheduling=Scheduling(max_batched_tokens=step_tokens)
        ) as engine:
            handle = engine.decode(prompt, sampling=Sampling(max_tokens=24, stop_tokens=()))
            require_same_tokens(engine.tokens(handle)[len(prompt) :], wanted, logits)


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
def test_greedy_decode_over_a_parent_equals_generate_over_the_concatenation(
    model: LoadedModel, oracle: Oracle, method: str
) -> None:
    rng = random.Random(5)
    first, second, header = draw_tokens(rng), draw_tokens(rng), draw_tokens(rng, 1, 4)
    wanted, logits = oracle.generate([*first, *second, *header], 24)
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23), method=method) as engine:
        one = engine.prefill(first)
        two = engine.prefill(second, [one])
        handle = engine.decode(header, [one, two], sampling=Sampling(max_tokens=24, stop_tokens=()))
        require_same_tokens(engine.tokens(handle)[len(header) :], wanted, logits)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_random_choreographies_equal_the_oracle(
    model: LoadedModel, oracle: Oracle, logits_by_seed: dict[int, list[torch.Tensor]], seed: int
) -> None:
    """Random programs of prefills and decodes over reordered, gapped and overlapping views, in random batches."""
    rng, lazy = random.Random(seed), random.Random(f"lazy {seed}")
    made: list[tuple[MessageHandle, OracleMessage]] = []
    with Engine.load(
        model, memory=Memory(kv_budget_bytes=1 << 23), scheduling=Scheduling(max_batched_tokens=rng.choice([512, 16]))
    ) as engine:
        for round_ in range(4):
            prefills: list[Prefill] = []
            decodes: list[Decode] = []
            expected: list[tuple[int, list[int], list[int], OracleMessage]] = []
            for number in range(rng.randint(1, 4)):
                view = rng.sample(made, rng.randint(0, min(4, len(made))))
                offsets, new_offset = draw_offsets(rng, [h.length for h, _ in view])
                parents, seen = [handle for handle, _ in view], [message for _, message in view]
                header, rest = draw_tokens(rng, 1, 20), draw_tokens(rng, 1, 12)
                if rng.random() < 0.4:
                    prefills.append(Prefill(header, parents, offsets, new_offset, lazy=lazy.random() < 0.5))
                    expected.append((-1, header, [], oracle.encode(header, seen, offsets, new_offset)))
                else:
                    key = 1000 * seed + 10 * round_ + number
                    decodes.append(Decode(header, parents, offsets, new_offset, sampling=forced(rest, key)))
                    expected.append((key, header, rest, oracle.encode(header + rest, seen, offsets, new_offset)))
            handles = iter([*engine.prefill(prefills)] if prefills else [])
            decoded = iter([*engine.decode(decodes)] if decodes else [])
            for key, header, rest, message in expected:
                handle = next(handles if key < 0 else decoded)
                assert engine.tokens(handle) == header + rest
                made.append((handle, message))
                if key >= 0:
                    mine = logits_by_seed[key]
                    require_close(mine, oracle.logits(message)[len(header) - 1 : len(header) - 1 + len(mine)])
        engine.check()


def draw_offsets(rng: random.Random, lengths: list[int]) -> tuple[list[int], int]:
    """Sequential, gapped, or anywhere: overlapping parents and new messages before or inside them."""
    kind = rng.choice(["sequential", "gapped", "anywhere"])
    offsets, at = [], 0
    for length in lengths:
        if kind == "anywhere":
            at = rng.randrange(300)
        offsets.append(at)
        at += length + (rng.randrange(50) if kind == "gapped" else 0)
    return offsets, rng.randrange(300) if kind == "anywhere" else at


def test_one_message_at_two_offsets_in_the_same_step(
    model: LoadedModel, oracle: Oracle, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    rng = random.Random(11)
    shared, header, rest = draw_tokens(rng, 30, 30), [5, 9], draw_tokens(rng, 10, 10)
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        message = engine.prefill(shared, position=40)
        calls = [
            Decode(header, [message], [offset], new, sampling=forced(rest, seed))
            for seed, (offset, new) in enumerate([(0, 30), (100, 130), (40, 20)])
        ]
        before = engine.stats()
        engine.decode(calls)
        after = engine.stats()
    assert after.decode_rows - before.decode_rows == 3 * (after.decode_steps - before.decode_steps)
    alone = oracle.encode(shared, [], [], 40)
    for seed, (offset, new) in enumerate([(0, 30), (100, 130), (40, 20)]):
        wanted = oracle.encode(header + rest, [alone], [offset], new)
        require_close(logits_by_seed[seed], oracle.logits(wanted)[1:-1])


def test_the_same_view_anywhere_gives_the_same_logits(
    model: LoadedModel, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    rng = random.Random(13)
    shared, rest = draw_tokens(rng, 25, 25), draw_tokens(rng, 8, 8)
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        message = engine.prefill(shared)
        engine.decode([7], [message], [0], 25, sampling=forced(rest, 0))
        engine.decode([7], [message], [300], 325, sampling=forced(rest, 1))
    require_close(logits_by_seed[0], torch.stack(logits_by_seed[1]))


def test_a_parent_left_out_of_the_view_has_no_influence(
    engine: Engine, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    """Bitwise: the same steps and shapes, other words in the message that is not in the view."""
    rng = random.Random(17)
    shown, rest = draw_tokens(rng, 20, 20), draw_tokens(rng, 8, 8)
    for seed, hidden in enumerate([draw_tokens(rng, 20, 20), draw_tokens(rng, 20, 20)]):
        with engine.scope():
            engine.prefill(hidden)
            engine.decode([7], [engine.prefill(shown)], sampling=forced(rest, seed))
    assert torch.equal(torch.stack(logits_by_seed[0]), torch.stack(logits_by_seed[1]))


def test_batched_decodes_equal_decodes_alone(engine: Engine, logits_by_seed: dict[int, list[torch.Tensor]]) -> None:
    rng = random.Random(19)
    root = engine.prefill(draw_tokens(rng, 30, 30))
    branches = [engine.prefill(draw_tokens(rng), [root]) for _ in range(6)]
    views = [[root, *rng.sample(branches, rng.randint(1, 6))] for _ in range(8)]
    rests = [draw_tokens(rng, 3, 12) for _ in views]
    engine.decode([Decode([7], v, sampling=forced(r, i)) for i, (v, r) in enumerate(zip(views, rests, strict=True))])
    for i, (view, rest) in enumerate(zip(views, rests, strict=True)):
        engine.decode([7], view, sampling=forced(rest, 100 + i))
        require_close(logits_by_seed[i], torch.stack(logits_by_seed[100 + i]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "gpt_neox"])
def test_half_precision_stays_near_the_oracle(
    tmp_path: Path, logits_by_seed: dict[int, list[torch.Tensor]], family: str, dtype: torch.dtype
) -> None:
    """Not of mixtures of experts: a rounding there may choose another expert."""
    rng = random.Random(23)
    path = save_tiny(tmp_path, family, FAMILIES[family], seed=3)
    oracle = Oracle(path)
    first, second, rest = draw_tokens(rng), draw_tokens(rng), draw_tokens(rng, 6, 6)
    with Engine.load(path, memory=Memory(kv_budget_bytes=1 << 23), dtype=dtype) as engine:
        one, two = engine.prefill([Prefill(first), Prefill(second)])
        engine.decode([7], [two, one], sampling=forced(rest, 0))
    alone = [oracle.encode(first, [], [], 0), oracle.encode(second, [], [], 0)]
    wanted = oracle.encode([7, *rest], [alone[1], alone[0]], [0, len(second)], len(first) + len(second))
    theirs = oracle.logits(wanted)[:-1]
    error = (torch.stack(logits_by_seed[0]).float() - theirs).abs().mean() / theirs.abs().mean()
    assert error < (0.06 if dtype == torch.bfloat16 else 0.01)
