"""How one request's tokens are chosen."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support import sampling as oracle
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from choreo_agents.errors import InvalidRequestError
from choreo_agents.sampling import (
    AnswerPaths,
    BatchSampler,
    ChoiceConstraint,
    Draw,
    SampledToken,
    Sampler,
    Sampling,
    TokenSampler,
    choose_tokens,
)
from choreo_agents.sampling.draw import CountedTokens
from choreo_agents.sampling.noise import noise_key

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
    sampler = TokenSampler(Sampling(temperature=1.0, repetition_penalty=1.3), 3, logits_callback=seen.append)
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
    assert chi_square(draws(1000), PROBABILITIES) < 16.3


def test_temperature_sharpens_the_distribution() -> None:
    sharper = (LOGITS / 0.5).softmax(-1)
    chosen = draws(1000, temperature=0.5)
    assert chi_square(chosen, sharper) < 16.3 < chi_square(chosen, PROBABILITIES)


def test_filtered_draws_follow_what_is_left() -> None:
    chosen = draws(1000, top_k=3, top_p=0.8)
    assert set(chosen) == {0, 1}
    assert chi_square(chosen, torch.tensor([0.625, 0.375])) < 10.8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"top_k": 20},
        {"top_k": 200},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.5, "top_k": 150, "top_p": 0.8, "min_p": 0.01},
    ],
    ids=str,
)
def test_each_word_is_drawn_as_often_as_the_filters_leave_it(options: dict[str, float]) -> None:
    """A chi-square five standard deviations above its mean is rarer than one in a hundred thousand."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 2.0
    sampling = Sampling(**({"temperature": 1.0} | options))
    wanted, _ = oracle.probabilities(logits.double(), sampling)
    count = 4_000
    drawn = torch.tensor(
        BatchSampler().draw(logits.expand(count, -1), [Draw(sampling, noise_key(8, step)) for step in range(count)])
    )
    counts = torch.bincount(drawn, minlength=300)
    assert counts[wanted == 0].sum() == 0
    # Words that are drawn less than ten times are counted together.
    often = wanted * count >= 10
    seen = torch.cat([counts[often], counts[~often].sum()[None]]).double()
    expected = torch.cat([wanted[often], wanted[~often].sum()[None]]) * count
    seen, expected = seen[expected > 0], expected[expected > 0]
    degrees = len(seen) - 1
    found = float(((seen - expected) ** 2 / expected).sum())
    assert found < degrees + 5 * (2 * degrees) ** 0.5 + 10


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(5, temperature=0.0, logits=torch.tensor([1.0, 3.0, 2.0])) == [1] * 5


def test_of_equally_likely_words_the_first_is_taken() -> None:
    logits = torch.zeros(1000)
    logits[[300, 301, 900]] = 1.0
    assert draws(2, temperature=0.0, logits=logits) == [300, 300]


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 1e-300, 5e-324])
def test_a_temperature_close_to_zero_takes_the_likeliest(temperature: float) -> None:
    assert draws(5, temperature=temperature, logits=torch.tensor([10.0, 30.0, 20.0])) == [1] * 5


def test_a_very_high_temperature_leaves_nothing_to_the_logits() -> None:
    chosen = draws(400, temperature=1e300, logits=torch.tensor([0.0, 90.0, -90.0, 10.0]))
    assert chi_square(chosen, torch.full((4,), 0.25)) < 16.3


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
    sampler = TokenSampler(Sampling(temperature=1.0, forced_token_ids=(7, 0, 7)), 0)
    assert [taken(sampler, LOGITS) for _ in range(3)] == [7, 0, 7]


def kept(logits: torch.Tensor, **options: float) -> set[int]:
    """What is ever drawn, at a temperature at which all words that are left are about as likely."""
    sampling = {"temperature": 1.0} | options
    return {TokenSampler(Sampling(**sampling), seed).choose(logits).token for seed in range(100)}


def test_top_k_keeps_ties_with_the_last() -> None:
    assert kept(torch.tensor([1.0, 2.0, 2.0, 3.0]), top_k=2) == {1, 2, 3}


@pytest.mark.parametrize("words", [300, 3000])
def test_top_k_keeps_any_number_of_ties(words: int) -> None:
    """More than are cut out of a row at once."""
    drawn = kept(torch.zeros(words).index_fill(0, torch.tensor([5]), 1.0), top_k=2)
    assert len(drawn) > 60 and max(drawn) > words * 0.9


@pytest.mark.parametrize("k", [0, 4, 9])
def test_top_k_of_none_or_all_keeps_all(k: int) -> None:
    assert kept(LOGITS, top_k=k) == {0, 1, 2, 3}


@pytest.mark.parametrize(("p", "count"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)])
def test_top_p_keeps_the_fewest_that_reach_it(p: float, count: int) -> None:
    assert kept(LOGITS[[2, 0, 3, 1]], top_p=p) == set([1, 3, 0, 2][:count])


def test_top_p_keeps_the_first_of_equally_likely_words() -> None:
    """Ten of a thousand, whose weights are rounded: not one more, and not one less."""
    assert kept(torch.zeros(1000), top_p=0.00999) == set(range(10))


def test_top_k_comes_before_top_p() -> None:
    """Of the two likeliest the first has 0.625: enough for 0.6 only once the others are gone."""
    assert kept(LOGITS, top_k=2, top_p=0.6) == {0}
    assert kept(LOGITS, top_p=0.6) == {0, 1}


def test_temperature_comes_before_top_p() -> None:
    assert kept(LOGITS, temperature=0.25, top_p=0.8) == {0}


def test_min_p_keeps_what_is_likely_enough() -> None:
    assert kept(LOGITS, min_p=0.2) == {0, 1, 2} and kept(LOGITS, min_p=1.0) == {0}
    assert kept(LOGITS, min_p=0.2, top_p=0.7) == {0, 1}


def test_what_is_no_number_is_not_drawn() -> None:
    logits = torch.tensor([float("nan"), 1.0, float("-inf"), 2.0])
    assert kept(logits) == {1, 3} and draws(1, logits, temperature=0.0) == [3]
    assert kept(torch.tensor([0.0, float("inf"), 3.0])) == {1}


class Alone:
    """A sampler that chooses by itself."""

    constraint: ChoiceConstraint | None = None

    def choose(self, logits: torch.Tensor) -> SampledToken:
        return SampledToken(len(logits) - 1)

    def take(self, token: int) -> None:
        pass

    def withdraw(self) -> None:
        pass


def step_of(samplers: Sequence[Sampler], logits: torch.Tensor, batch: BatchSampler) -> list[SampledToken]:
    """What they choose together and go on with."""
    chosen = choose_tokens(samplers, logits, batch)
    for sampler, each in zip(samplers, chosen, strict=True):
        sampler.take(each.token)
    return chosen


def test_a_sampler_that_chooses_by_itself_is_asked_by_itself() -> None:
    logits = LOGITS.expand(3, -1)
    mine, yours = (TokenSampler(Sampling(temperature=1.0), seed) for seed in (3, 4))
    together = [step_of([mine, Alone(), yours], logits, BatchSampler()) for _ in range(10)]
    assert [[chosen.token for chosen in step] for step in together] == [
        [one, 3, two] for one, two in zip(draws(10, seed=3), draws(10, seed=4), strict=True)
    ]


def test_a_step_of_all_kinds_is_what_each_is_alone() -> None:
    """Forced, guided, refused once, penalised, with log-probabilities and without."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randn(6, 6, 40, generator=generator)
    steps[:, 1, 9] = 9.0

    def samplers() -> list[TokenSampler]:
        led = AnswerPaths(frozenset({(4, 1), (5, 2)}), frozenset({(6,)}), frozenset({9}), 20)
        return [
            TokenSampler(Sampling(forced_token_ids=(1, 2, 3, 4, 5, 6), logprobs=2), 0),
            TokenSampler(
                Sampling(temperature=1.0, choices=("x",), answer_prefix="y"), 1, constraint=ChoiceConstraint(led)
            ),
            TokenSampler(Sampling(temperature=1.0, repetition_penalty=3.0, logprobs=0), 2, seen=[3, 4, 4]),
            TokenSampler(Sampling(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5), 5, seen=[3]),
            TokenSampler(Sampling(logprobs=5), 3),
            TokenSampler(Sampling(temperature=0.7, top_k=5, top_p=0.9), 4),
        ]

    batch, shared, alone = BatchSampler(), samplers(), samplers()
    for step in steps[:3]:
        chosen = step_of(shared, step, batch)
        assert chosen == [
            step_of([sampler], logits[None], batch)[0] for sampler, logits in zip(alone, step, strict=True)
        ]
    assert shared[1].constraint is not None and shared[1].constraint.done


@pytest.mark.parametrize("words", [1279, 1280])
@pytest.mark.parametrize(
    "other", [{"top_k": 2, "top_p": 0.9}, {"top_p": 0.9, "presence_penalty": 1.0}], ids=["tied", "penalised"]
)
def test_rows_of_two_kinds_that_take_turns_are_those_that_they_are_alone(other: dict[str, float], words: int) -> None:
    """0 and 2, then 1 and 3: as long as 0 to 3, and in another order. So are rows that a tie sends back."""
    logits = torch.randn(4, words, generator=torch.Generator().manual_seed(4)) * 8.0
    if "top_k" in other:
        logits[1::2] = logits[1::2].clamp(min=0.0)
        logits[1::2, ::2] = logits[1::2].amax(dim=-1, keepdim=True)
    kinds = [
        Sampling(temperature=temperature, **kind)
        for temperature, kind in zip((0.25, 1.0, 0.5, 0.75), ({"top_p": 0.9}, other) * 2, strict=True)
    ]
    for seed in range(20):
        draws = []
        for row, sampling in enumerate(kinds):
            counted = CountedTokens(sampling, [], logits.device)
            if row % 2 and "top_k" not in other:
                counted.add(int(logits[row].argmax()))
            draws.append(Draw(sampling, noise_key(seed, row), penalties=counted.penalties()))
        together = BatchSampler().draw(logits, draws)
        assert together == [BatchSampler().draw(logits[row : row + 1], [draws[row]])[0] for row in range(4)]


def test_a_penalised_answer_never_repeats_itself() -> None:
    sampler = TokenSampler(Sampling(temperature=1.0, repetition_penalty=1e9), 0, seen=[2, 2])
    drawn = [taken(sampler, torch.full((6,), -5.0)) for _ in range(5)]
    assert sorted(drawn) == [0, 1, 3, 4, 5]


def test_what_was_sampled_loses_presence_once_and_frequency_for_each_time() -> None:
    """Of logits 1.0 apart, once 0.6 and 0.25 are less than that, and 0.6 and twice 0.25 are more."""
    sampler = TokenSampler(Sampling(presence_penalty=0.6, frequency_penalty=0.25, logprobs=0), 0, seen=[1, 1, 1])
    logits = torch.tensor([2.0, 1.0, -9.0])
    assert [taken(sampler, logits) for _ in range(6)] == [0, 0, 1, 0, 0, 0]
    encouraged = TokenSampler(Sampling(frequency_penalty=-2.0), 0)
    first = taken(encouraged, logits)
    assert taken(encouraged, logits.flip(0) * 0.1) == first, "below 0 it is likelier"


def test_log_probabilities_are_those_of_before_penalties() -> None:
    sampler = TokenSampler(Sampling(presence_penalty=2.0, logprobs=4), 0)
    told = [sampler.choose(LOGITS)]
    sampler.take(told[0].token)
    told.append(sampler.choose(LOGITS))
    assert [each.token for each in told] == [0, 1] and told[0].top == told[1].top


def test_a_penalty_of_many_words_is_kept_and_not_made_anew() -> None:
    """More than there was room for at first; a step adds to tensors, and makes none of the vocabulary's size."""
    counted = CountedTokens(Sampling(repetition_penalty=2.0, frequency_penalty=0.5), [7, 7, 9], torch.device("cpu"))
    first = counted.penalties()
    for token in [9, *range(100, 400), 9]:
        counted.add(token)
    last = counted.penalties()
    assert first is not None and last is not None
    assert first.words.tolist() == [7, 9] and last.words.tolist() == [7, 9, *range(100, 400)]
    assert last.losses.tolist() == [0.0, 1.0, *[0.5] * 300]
    row = torch.full((500,), 4.0)
    row[9] = -4.0
    last.apply_(row)
    assert row[[7, 8, 9, 100, 399, 400]].tolist() == [2.0, 4.0, -9.0, 1.5, 1.5, 4.0]
    kept = counted.penalties()
    assert kept is not None and kept.words.data_ptr() == last.words.data_ptr()


@pytest.mark.parametrize("penalty", [1e39, float("inf"), 1e-320])
def test_a_penalty_beyond_single_precision_leaves_numbers(penalty: float) -> None:
    """0 times infinity is none, and whatever is none would be chosen, or end the step for all."""
    for temperature in (0.0, 1.0):
        sampler = TokenSampler(Sampling(repetition_penalty=penalty, temperature=temperature), 0, seen=[0])
        assert sampler.choose(torch.tensor([0.0, 5.0, 90.0])).token == 2


def test_a_guide_that_allows_nothing_is_no_guide() -> None:
    class Strict(ChoiceConstraint):
        def allowed(self) -> tuple[int, ...]:
            return ()

    constraint = Strict(AnswerPaths(frozenset({(1,)}), frozenset(), frozenset(), 1))
    with pytest.raises(AssertionError, match="must allow"):
        TokenSampler(Sampling(), 0, constraint=constraint).choose(LOGITS)


class Allocated(TorchDispatchMode):
    """The largest tensor that is made, in numbers, beside views of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        there = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if is_tensor(each)}
        new = [each for each in tree_leaves(made) if is_tensor(each)]
        sizes = [each.numel() for each in new if each.untyped_storage().data_ptr() not in there]
        self.most = max([self.most, *sizes])
        return made


@pytest.mark.parametrize("other", [{"forced_token_ids": (1,)}, {"logprobs": 2}, {"presence_penalty": 1.0}], ids=str)
def test_a_row_that_asks_for_something_else_has_no_other_row_copied(other: dict[str, Any]) -> None:
    """Nothing larger than a block is made, whoever shares the step: half of its rows."""
    rows, words = 40, 16 * 1280
    logits = torch.randn(rows, words, generator=torch.Generator().manual_seed(0))
    kinds = [Sampling(**(other if row % 2 else {"temperature": 1.0, "top_k": 20})) for row in range(rows)]
    samplers = [TokenSampler(sampling, row) for row, sampling in enumerate(kinds)]
    with torch.inference_mode(), Allocated() as allocated:
        choose_tokens(samplers, logits, BatchSampler())
    assert allocated.most < rows * words / 2


@pytest.mark.parametrize(("words", "first"), [(200, 0), (1280, 0), (20_480, 0), (20_480, 700)])
def test_of_many_equally_likely_words_the_first_are_told(words: int, first: int) -> None:
    """However many there are: more than are looked at."""
    logits = torch.zeros(2, words)
    logits[1, :first] = -1.0
    told = BatchSampler().log_probabilities(logits, [0, 0], 3)
    assert [[word for word, _ in likeliest] for _, likeliest in told] == [[0, 1, 2], [first, first + 1, first + 2]]


@pytest.mark.parametrize("words", [5, 1000])
def test_log_probabilities_are_those_of_the_softmax(words: int) -> None:
    logits = torch.randn(words, generator=torch.Generator().manual_seed(0)) * 4
    chosen = TokenSampler(Sampling(logprobs=4), 0).choose(logits)
    wanted = logits.double().log_softmax(-1)
    best = wanted.topk(4)
    assert chosen.logprob == pytest.approx(float(wanted.max()), rel=1e-5, abs=1e-9)
    assert [word for word, _ in chosen.top] == best.indices.tolist()
    assert [value for _, value in chosen.top] == pytest.approx(best.values.tolist(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("height", [math.inf, -3e38, 1e30])
def test_log_probabilities_of_huge_logits_are_shares_too(height: float) -> None:
    """One of four equals each: however high or low they are."""
    logits = torch.full((1, 300), torch.finfo(torch.float32).min)
    logits[0, 7:11] = height
    [(own, best)] = BatchSampler().log_probabilities(logits, [8], 2)
    assert own == pytest.approx(-math.log(4)) and best == [(word, pytest.approx(-math.log(4))) for word in (7, 8)]


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
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"stop": ("",)},
        {"logprobs": -1},
        {"n": 0},
        {"max_tokens": 0},
        {"temprature": 1.0},
        {"seed": "x"},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_by_name(wrong: dict) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_sampling_is_frozen_and_greedy_by_default() -> None:
    sampling = Sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 1.0, 0, None)
    with pytest.raises(ValidationError, match="frozen"):
        sampling.temperature = 1.0
