"""How a decode ends: which of its tokens are the message's, and what closes it."""

from __future__ import annotations

import pytest

from choreo_agents.runtime.request import Decoding
from choreo_agents.sampling import Sampling, TokenSampler

EOS, USER = 2, 3


def decoding(*closing: int, left_out: tuple[int, ...] = (EOS, USER), **sampling: object) -> Decoding:
    wanted = Sampling.model_validate(sampling)
    stops = frozenset({EOS, USER, *closing[:1]})
    return Decoding(wanted, TokenSampler(wanted, 0), stops, closing, left_out=frozenset(left_out))


@pytest.mark.parametrize(
    ("closing", "sampled", "leaves_out", "missing"),
    [
        ((), [7, USER], True, ()),
        ((), [USER], True, ()),
        ((EOS,), [7, EOS], False, ()),
        ((EOS,), [7, USER], True, (EOS,)),
        ((EOS, 11), [7, EOS], False, (11,)),
        ((11, EOS), [7, EOS], True, (11, EOS)),
        ((11, EOS), [7, 11, EOS], False, ()),
        ((EOS,), [7, 8], False, (EOS,)),
    ],
)
def test_a_stop_token_stays_if_it_is_part_of_the_closing(
    closing: tuple[int, ...], sampled: list[int], leaves_out: bool, missing: tuple[int, ...]
) -> None:
    made = decoding(*closing)
    assert made.leaves_out_last(sampled) is leaves_out
    assert made.missing_end(sampled[:-1] if leaves_out else sampled) == missing


def test_tokens_that_a_call_names_or_forces_stay() -> None:
    assert not decoding(EOS, left_out=()).leaves_out_last([7, USER])
    assert not decoding(EOS, forced_token_ids=(7, USER)).leaves_out_last([7, USER])


def test_nothing_can_be_forced() -> None:
    assert decoding(EOS, forced_token_ids=()).is_silent and not decoding(EOS).is_silent
    assert decoding(EOS, forced_token_ids=()).longest == 1
