"""How one request's tokens are chosen."""

import pytest
import torch
from pydantic import ValidationError

from choreo_agents.sampling import Sampling, TokenSampler
from choreo_agents.sampling.filters import apply_filters, keep_top_k, keep_top_p

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
LOGITS = PROBABILITIES.log()


def draws(count: int, logits: torch.Tensor = LOGITS, *, seed: int = 0, **options: float) -> list[int]:
    sampler = TokenSampler(Sampling(**({"temperature": 1.0} | options)), seed)
    return [taken(sampler, logits) for _ in range(count)]


def taken(sampler: TokenSampler, logits: torch.Tensor) -> int:
    token = sampler.choose(logits).token
    sampler.take(token)
    return token


def test_a_choice_that_is_asked_for_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that failed is run again with the same noise, whether it failed before or after the choice."""
    seen: list[torch.Tensor] = []
    sampler = TokenSampler(Sampling(temperature=1.0, repetition_penalty=1.3), 3, watch=seen.append)
    drawn = []
    for again in (0, 2, 0, 1, 3, 0, 0, 5):
        said = [sampler.choose(LOGITS).token for _ in range(again + 1)]
        assert len(set(said)) == 1
        sampler.take(said[0])
        drawn.append(said[0])
    assert drawn == draws(8, seed=3, repetition_penalty=1.3)
    assert len(seen) == 8, "each is shown once"


def chi_square(chosen: list[int], probabilities: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(chosen), minlength=len(probabilities))
    expected = probabilities * len(chosen)
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_softmax() -> None:
    """Beyond 16.3 with three degrees of freedom is rarer than one in a thousand."""
    assert chi_square(draws(4000), PROBABILITIES) < 16.3


def test_temperature_sharpens_the_distribution() -> None:
    sharper = (LOGITS / 0.5).softmax(-1)
    chosen = draws(4000, temperature=0.5)
    assert chi_square(chosen, sharper) < 16.3 < chi_square(chosen, PROBABILITIES)


def test_filtered_draws_follow_what_is_left() -> None:
    chosen = draws(4000, top_k=3, top_p=0.8)
    assert set(chosen) == {0, 1}
    assert chi_square(chosen, torch.tensor([0.625, 0.375])) < 10.8


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(5, temperature=0.0, logits=torch.tensor([1.0, 3.0, 2.0])) == [1] * 5


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 1e-300, 5e-324])
def test_a_temperature_close_to_zero_takes_the_likeliest(temperature: float) -> None:
    assert draws(5, temperature=temperature, logits=torch.tensor([10.0, 30.0, 20.0])) == [1] * 5


def test_the_same_seed_draws_the_same_tokens() -> None:
    assert draws(50, seed=3) == draws(50, seed=3)
    assert draws(50, seed=3) != draws(50, seed=4)


@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert draws(5, seed=seed) == draws(5, seed=seed)


def test_requests_share_no_random_numbers() -> None:
    one, two = TokenSampler(Sampling(temperature=1.0), 3), TokenSampler(Sampling(temperature=1.0), 4)
    interleaved = []
    for _ in range(20):
        interleaved.append(taken(one, LOGITS))
        taken(two, LOGITS)
        torch.rand(1)
    assert interleaved == draws(20, seed=3)


def test_a_last_bit_of_the_logits_does_not_change_the_choice() -> None:
    assert draws(200, LOGITS) == draws(200, LOGITS + torch.tensor([1e-6, -1e-6, 1e-6, -1e-6]))


def test_bf16_logits_are_sampled_in_full_precision() -> None:
    assert draws(50, LOGITS.bfloat16()) == draws(50, LOGITS.bfloat16().float())


def test_forced_tokens_are_taken_whatever_the_logits_say() -> None:
    sampler = TokenSampler(Sampling(temperature=1.0, forced=(7, 0, 7)), 0)
    assert [taken(sampler, LOGITS) for _ in range(3)] == [7, 0, 7]


def test_top_k_keeps_ties_with_the_last() -> None:
    kept = keep_top_k(torch.tensor([1.0, 2.0, 2.0, 3.0]), 2)
    assert kept.isfinite().tolist() == [False, True, True, True]


@pytest.mark.parametrize("k", [0, 4, 9])
def test_top_k_of_none_or_all_keeps_all(k: int) -> None:
    assert torch.equal(keep_top_k(LOGITS, k), LOGITS)


@pytest.mark.parametrize(("p", "kept"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)])
def test_top_p_keeps_the_fewest_that_reach_it(p: float, kept: int) -> None:
    assert keep_top_p(LOGITS[[2, 0, 3, 1]], p).isfinite().sum() == kept


def test_top_k_comes_before_top_p() -> None:
    """Of the two likeliest the first has 0.625: enough for 0.6 only once the others are gone."""
    assert apply_filters(LOGITS, 1.0, 2, 0.6).isfinite().sum() == 1
    assert apply_filters(LOGITS, 1.0, 0, 0.6).isfinite().sum() == 2


def test_temperature_comes_before_top_p() -> None:
    assert apply_filters(LOGITS, 0.25, 0, 0.8).isfinite().sum() == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
        {"logprobs": -1},
        {"n": 0},
        {"max_tokens": 0},
        {"forced": ()},
        {"temprature": 1.0},
        {"seed": "x"},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_by_name(wrong: dict) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_sampling_is_frozen_and_greedy_by_default() -> None:
    sampling = Sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 1.0, 0, None)
    with pytest.raises(ValidationError, match="frozen"):
        sampling.temperature = 1.0
