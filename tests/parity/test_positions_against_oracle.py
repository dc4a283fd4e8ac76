"""How far from the start the engine is exact: anywhere, except for what Hugging Face's own angles have lost there.

Angles are fp32, a position times a frequency: rounded by up to 1.5e-5 radians at 300, 5e-4 at 10 000. What is read
where it was encoded has the same rounded angles as the oracle. What is moved has those of where it was encoded, and
the oracle those of where it is shown. `-s` prints the errors.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import TOLERANCE
from support.families import FAMILIES, save_tiny
from support.oracle import Oracle
from torch import Tensor

from choreo_agents import Decode, Engine, Memory, Sampling
from choreo_agents.models import LoadedModel, load_model

SERVED = ("llama", "llama-yarn", "phi3", "gemma2", "cohere2", "gpt_neox")
FAR = (1_000, 8_000, 65_000, 260_000)


@pytest.fixture(scope="module", params=SERVED)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {**FAMILIES[request.param], "max_position_embeddings": 1 << 19}
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, settings, seed=3)


@pytest.fixture(scope="module")
def model(model_path: Path) -> LoadedModel:
    return load_model(model_path)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Oracle:
    return Oracle(model_path)


@pytest.fixture(scope="module")
def ideal(model_path: Path) -> Oracle:
    """The oracle with angles in doubles, too."""
    oracle = Oracle(model_path)
    for buffer in oracle.model.buffers():
        buffer.data = buffer.data.double()
    oracle.model.register_forward_pre_hook(with_wide_positions, with_kwargs=True)
    return oracle


def with_wide_positions(
    _: object, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, options | {"position_ids": options["position_ids"].double()}


def heard(model: LoadedModel, encoded: int, shown: int) -> Tensor:
    """Logits of what is said about two messages, one of which has seen the other, [tokens, vocabulary]."""
    one, two, header, rest = drawn()
    seen: list[Tensor] = []
    forced = Sampling(forced_token_ids=tuple(rest))
    watch = lambda logits: seen.append(logits.double())  # noqa: E731
    # A new engine each time: another would show what it has at another place.
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        first = engine.prefill(one, position=encoded)
        second = engine.prefill(two, [first], [encoded], encoded + len(one))
        offsets = [shown, shown + len(one)]
        engine.decode([Decode(header, [first, second], offsets, offsets[1] + len(two), forced, logits_callback=watch)])
    return torch.stack(seen)


def expected(oracle: Oracle, shown: int) -> Tensor:
    one, two, header, rest = drawn()
    first = oracle.encode(one, [], [], shown)
    second = oracle.encode(two, [first], [shown], shown + len(one))
    offsets = [shown, shown + len(one)]
    said = oracle.encode([*header, *rest], [first, second], offsets, offsets[1] + len(two))
    return oracle.logits(said)[len(header) - 1 : -1]


def drawn() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 360) for _ in range(count)] for count in (30, 25, 4, 8)]


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@pytest.mark.parametrize("at", FAR)
def test_what_is_read_where_it_was_encoded_is_exact_anywhere(model: LoadedModel, oracle: Oracle, at: int) -> None:
    error = distance(heard(model, at, at), expected(oracle, at))
    print(f"{Path(model.name).name}, encoded and read at {at}: {error:.1e}")  # noqa: T201
    assert error <= TOLERANCE


@pytest.mark.parametrize("at", FAR)
def test_what_is_moved_is_off_by_what_the_angles_there_have_lost(
    model: LoadedModel, oracle: Oracle, ideal: Oracle, at: int
) -> None:
    """The oracle's angles are rounded where they are shown, and the engine's where they were encoded: no more."""
    wanted = expected(oracle, at)
    lost = distance(wanted, expected(ideal, at))
    for encoded, shown in ((0, at), (at // 2, at)):
        error = distance(heard(model, encoded, shown), wanted)
        print(f"{Path(model.name).name}, moved from {encoded} to {shown}: {error:.1e}, where angles lose {lost:.1e}")  # noqa: T201
        assert error <= TOLERANCE + 2 * lost


@pytest.mark.parametrize("at", FAR)
def test_moving_is_exact_anywhere_where_angles_are(tmp_path: Path, at: int) -> None:
    """Frequencies that are powers of two: no product with a position is rounded."""
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 256.0},
        "max_position_embeddings": 1 << 19,
    }
    path = save_tiny(tmp_path, "llama", settings, seed=3)
    model, oracle = load_model(path), Oracle(path)
    [frequencies] = [buffer for name, buffer in oracle.model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    assert torch.equal(frequencies, 0.5 ** torch.arange(8))
    for encoded, shown in ((0, at), (at // 3, at), (at, 0)):
        assert distance(heard(model, encoded, shown), expected(oracle, shown)) <= TOLERANCE
