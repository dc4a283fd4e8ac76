"""Noise: what a hash of seed, step and word is."""

from __future__ import annotations

import math

import pytest
import torch
from support import sampling as oracle

from choreo_agents.sampling.draw import exp2_, rounded_for_sums
from choreo_agents.sampling.noise import first_bits, gumbel, hashed, noise_key

WORDS = 50_000


def bits(*keys: tuple[int, int, int, int]) -> torch.Tensor:
    ids = torch.arange(WORDS, dtype=torch.int32)
    return torch.stack([first_bits(ids, key) for key in keys])


def test_noise_is_pinned() -> None:
    """Another hash would be another answer to every seed that somebody has written down."""
    assert noise_key(7, 3) == (786632295, 959755548, 316605539, 523380654)
    assert [hashed(word, 1, 2) for word in (0, 1, 151_935)] == [1605432451, 3359271750, 3232850301]


def test_tensors_and_plain_numbers_hash_alike() -> None:
    key = noise_key(5, 1)
    found = bits(key)[0].tolist()
    assert all(found[word] == hashed(word, key[0], key[1]) & (2**31 - 1) for word in range(0, WORDS, 97))
    assert min(found) >= 0


def test_noise_is_that_of_the_oracle() -> None:
    for word in range(300):
        assert gumbel(word, noise_key(9, 4)) == pytest.approx(oracle.noise(9, 4, word), rel=1e-12, abs=1e-12)


def test_the_ends_of_what_a_hash_gives_have_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a unit above 0, and what is rounded to 1."""
    ends = []
    for rest in (0, 2**32 - 1):
        monkeypatch.setattr("choreo_agents.sampling.noise.hashed", lambda *_, rest=rest: rest)
        ends.append(gumbel(5, noise_key(0, 0)))
    assert ends == pytest.approx([64 * math.log(2), -math.log(53 * math.log(2))])


def test_every_bit_is_as_often_set_as_not() -> None:
    """Within 5 standard deviations."""
    some = bits(*[noise_key(seed, step) for seed in range(4) for step in range(4)])
    for bit in range(31):
        share = float(((some >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(some.numel()), bit


def test_uniform_numbers_are_uniform_and_steps_seeds_and_neighbours_have_nothing_in_common() -> None:
    keys = [noise_key(0, 0), noise_key(0, 1), noise_key(1, 0), noise_key(-1, 0)]
    uniform = bits(*keys).double() / 2**31
    counts = torch.stack([row.histc(64, 0, 1) for row in uniform])
    assert ((counts - WORDS / 64) ** 2 / (WORDS / 64)).sum(dim=1).max() < 120  # 63 degrees: rarer than 1 in 50,000
    beside = torch.cat([uniform, uniform[:1].roll(1, 1), uniform[:1].roll(128, 1)])
    related = torch.corrcoef(beside) - torch.eye(len(beside))
    assert related.abs().max() < 5 / math.sqrt(WORDS)


def test_small_numbers_are_as_often_small_as_they_should_be() -> None:
    """What decides a draw are the least of many: of 1.6 million about 391 are below 2**-12, and 24 below 2**-16."""
    some = bits(*[noise_key(2, step) for step in range(32)]).double() / 2**31
    for power in (8, 12, 16):
        expected = some.numel() / 2**power
        assert abs(int((some < 2.0**-power).sum()) - expected) < 5 * math.sqrt(expected)


def test_every_word_is_as_often_the_least_in_any_place_to_another() -> None:
    """Chi-squares of 63 and 62 degrees: beyond 120 is rarer than 1 in 50,000."""
    keys, ids = [noise_key(1, step) for step in range(20_000)], torch.arange(64, dtype=torch.int32)
    some = torch.stack([first_bits(ids, key) for key in keys])
    first, second = some.topk(2, largest=False).indices.T
    for counts in (torch.bincount(first, minlength=64), torch.bincount((first - second) % 64, minlength=64)[1:]):
        expected = len(keys) / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < 120


def test_exp2_is_exact_to_single_precision_and_in_order() -> None:
    exponents = -torch.cat([torch.linspace(0, 126, 400_001), torch.tensor([127.0, 200.0, math.inf])])
    wanted = torch.exp2(exponents.double())
    found = exp2_(exponents.clone())
    assert ((found.double() - wanted)[:-3].abs() / wanted[:-3]).max() < 2e-7
    assert found[0] == 1.0 and found[-3:].tolist() == [0.0] * 3
    assert (found.diff() <= 0).all() or found.diff().clamp(min=0).max() < 1e-6


@pytest.mark.parametrize("words", [128, 1000, 262_144])
def test_sums_are_the_same_in_any_order(words: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(words, generator=generator).double() ** 8
    rounded = rounded_for_sums(weights)
    assert (rounded - weights).abs().max() < 2.0**-33
    total = float(rounded.sum())
    for _ in range(3):
        assert float(rounded[torch.randperm(words, generator=generator)].cumsum(0)[-1]) == total
    assert math.fsum(rounded.tolist()) == total
