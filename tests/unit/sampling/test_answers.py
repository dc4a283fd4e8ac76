"""Where the tokens of an answer may go."""

from __future__ import annotations

import pytest
import torch

from choreo_agents.errors import InvalidRequestError
from choreo_agents.sampling import AnswerPaths, ChoiceConstraint, Sampling, TokenSampler

END = 9
LEAD = frozenset({(1, 2), (3, 2)})


def paths(*choices: tuple[int, ...], lead: frozenset[tuple[int, ...]] = LEAD, max_tokens: int = 20) -> AnswerPaths:
    return AnswerPaths(frozenset(choices), lead, frozenset({END}), max_tokens)


def constraint_of(*choices: tuple[int, ...]) -> ChoiceConstraint:
    return ChoiceConstraint(paths(*choices, lead=frozenset()))


def walk(constraint: ChoiceConstraint, *tokens: int) -> tuple[int, ...] | None:
    """What may follow these."""
    for token in tokens:
        allowed = constraint.allowed()
        assert not constraint.done and (allowed is None or token in allowed)
        constraint.take(token)
    return constraint.allowed()


def test_only_the_choices_may_be_written() -> None:
    constraint = constraint_of((4, 5, 6), (4, 7), (8,))
    assert constraint.allowed() == (4, 8)
    assert walk(constraint, 4) == (5, 7) and not constraint.done
    walk(constraint, 7)
    assert constraint.done


def test_a_choice_that_nothing_can_follow_is_the_end() -> None:
    constraint = constraint_of((4,), (5,))
    walk(constraint, 5)
    assert constraint.done


def test_a_choice_that_starts_another_may_end_or_go_on() -> None:
    ended, longer = constraint_of((4,), (4, 5)), constraint_of((4,), (4, 5))
    assert walk(ended, 4) == walk(longer, 4) == (5, END) and not ended.done
    walk(ended, END)
    walk(longer, 5)
    assert ended.done and longer.done


def test_no_end_stands_where_no_choice_is_complete() -> None:
    assert constraint_of((4,), (4, 5, 6)).allowed() == (4,)
    assert walk(constraint_of((4,), (4, 5, 6)), 4, 5) == (6,)


@pytest.mark.parametrize(("choices", "ambiguous"), [([(4, 5), (4, 6)], False), ([(4, 5), (4, 5, 6)], True)])
def test_whether_one_choice_starts_another(choices: list[tuple[int, ...]], ambiguous: bool) -> None:
    assert paths(*choices).is_ambiguous() == ambiguous


def test_after_the_lead_only_choices_may_come() -> None:
    heard: list[int] = []
    constraint = ChoiceConstraint(paths((4,)), lead_complete=lambda token: heard.append(token) or token == 7)
    assert walk(constraint, 0, 5, 4) is None
    assert walk(constraint, 7) == (4,)
    walk(constraint, 4)
    assert constraint.done and heard == [0, 5, 4, 7], "it watches the free part alone"


def test_who_would_end_before_the_lead_is_led_on() -> None:
    constraint = ChoiceConstraint(paths((4,)))
    assert walk(constraint, 0, 5) is None
    assert not constraint.refuses(0) and constraint.allowed() is None
    assert constraint.refuses(END) and constraint.allowed() == (1, 3)
    assert walk(constraint, 3) == (2,)
    assert walk(constraint, 2) == (4,), "the lead is complete, by its tokens"
    assert not constraint.refuses(END)


def test_a_text_to_stop_at_leads_on_too() -> None:
    constraint = ChoiceConstraint(paths((4,)), stop_complete=lambda token: token == 8)
    assert walk(constraint, 0) is None
    assert walk(constraint, 8) == (1, 3)
    both = ChoiceConstraint(paths((4,)), lead_complete=lambda token: token == 8, stop_complete=lambda token: token == 8)
    assert walk(both, 8) == (4,)
    assert walk(ChoiceConstraint(paths((8, 8)), stop_complete=lambda token: token == 8), 8, 1, 2, 8) == (8,)


def test_a_lead_that_was_begun_is_not_begun_again() -> None:
    constraint = ChoiceConstraint(paths((4,), lead=frozenset({(1, 2, 3), (5, 2, 3)})))
    walk(constraint, 0, 1, 2)
    assert constraint.refuses(END) and constraint.allowed() == (3,)
    assert walk(constraint, 3) == (4,)


@pytest.mark.parametrize(("max_tokens", "free"), [(5, 0), (6, 1), (9, 4)])
def test_the_last_tokens_are_kept_for_lead_and_answer(max_tokens: int, free: int) -> None:
    constraint = ChoiceConstraint(paths((4,), (4, 5, 6), max_tokens=max_tokens))
    for _ in range(free):
        assert constraint.allowed() is None
        constraint.take(0)
    assert constraint.allowed() == (1, 3)
    walk(constraint, 1, 2, 4, 5, 6)
    assert constraint.done


def test_a_lead_is_complete_where_one_way_to_write_it_is() -> None:
    constraint = ChoiceConstraint(paths((4,), lead=frozenset({(1,), (1, 1)}), max_tokens=3))
    assert walk(constraint, 1) == (4,)


def test_what_is_not_allowed_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="token 5 is not allowed"):
        constraint_of((4,)).take(5)
    done = constraint_of((4,))
    walk(done, 4)
    with pytest.raises(AssertionError, match="complete"):
        done.take(4)
    with pytest.raises(AssertionError, match="too few"):
        ChoiceConstraint(paths((4,), max_tokens=2))


LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])


def taken(sampler: TokenSampler) -> int:
    token = sampler.choose(LOGITS).token
    sampler.take(token)
    return token


def test_an_end_that_was_refused_is_refused_again() -> None:
    """And the lead that comes for it is drawn with the same noise."""
    for seed in range(20):
        twice, once = (
            TokenSampler(
                Sampling(temperature=1.0, choices=("a",), answer_prefix="b"),
                seed,
                constraint=ChoiceConstraint(paths((4,), (5,), lead=frozenset({(1, 2), (3, 2)}), max_tokens=6)),
            )
            for _ in range(2)
        )
        ends = torch.full((10,), -9.0)
        ends[END] = 9.0
        assert twice.choose(ends) == twice.choose(ends)
        for _ in range(4):
            assert twice.choose(ends) == once.choose(ends)
            token = twice.choose(ends).token
            twice.take(token)
            once.take(token)
            if once.constraint is not None and once.constraint.done:
                break


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_guided_sampler_takes_the_likeliest_of_the_allowed(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_k=1, choices=("a",))
    sampler = TokenSampler(sampling, 0, constraint=constraint_of((4, 1), (5, 2), (5, 3)))
    assert [taken(sampler) for _ in range(2)] == [5, 3]


def test_guided_draws_follow_what_is_allowed() -> None:
    """0.2 and 0.8 of the two; a ratio beyond these bounds is rarer than one in ten thousand."""
    logits = torch.tensor([0.9, 0.02, 0.08]).log()
    sampling = Sampling(temperature=1.0, choices=("a",))
    drawn = [
        TokenSampler(sampling, seed, constraint=constraint_of((1,), (2,))).choose(logits).token for seed in range(1000)
    ]
    assert 150 < drawn.count(1) < 250 and drawn.count(1) + drawn.count(2) == 1000


def test_no_allowed_token_can_be_ruled_out_by_the_model() -> None:
    for temperature in (0.0, 1.0):
        for value in (float("-inf"), float("nan")):
            sampler = TokenSampler(Sampling(temperature=temperature), 0, constraint=constraint_of((4,), (5,)))
            logits = LOGITS.clone()
            logits[[4, 5]] = value
            assert sampler.choose(logits).token in (4, 5)


def test_log_probabilities_of_guided_tokens_are_the_models_own() -> None:
    chosen = TokenSampler(Sampling(logprobs=1, choices=("a",)), 0, constraint=constraint_of((4,))).choose(LOGITS)
    wanted = LOGITS.double().log_softmax(-1)
    assert chosen.logprob == pytest.approx(float(wanted[4])) and chosen.top[0][0] == 9


def test_forced_tokens_need_no_guide() -> None:
    sampler = TokenSampler(Sampling(forced_token_ids=(0, 7), choices=("a",)), 0, constraint=constraint_of((4,)))
    assert [taken(sampler) for _ in range(2)] == [0, 7] and sampler.constraint is None


@pytest.mark.parametrize("wrong", [{"choices": ("",)}, {"choices": "yes"}, {"answer_prefix": "I vote for"}])
def test_wrong_choices_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        Sampling(**wrong)
