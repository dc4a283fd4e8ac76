"""What leads a decode: a constraint of one's own, its end, and masks that are filled together."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from choreo_agents.errors import ConstraintError
from choreo_agents.models.constraints.masks import StepMasks, unpack, unpack_on_device
from choreo_agents.sampling import (
    BLANK_LINES,
    Allowed,
    ConstrainedAnswer,
    Grammar,
    Phase,
    Sampling,
    ThinkingConstraint,
    TokenSampler,
)

WORDS, END = 12, 9


class Counting:
    """Allows 1, 2, 3 and so on, each once and in order; after the third an end, too."""

    def __init__(self, last: int = 5, *, packed: bool = False) -> None:
        self.done = False
        self.said: list[int] = []
        self._last, self._packed = last, packed

    def allowed(self) -> Allowed:
        ids = [len(self.said) + 1, *([END] if len(self.said) >= 3 else [])]
        if not self._packed:
            return ids
        mask = torch.zeros(WORDS, dtype=torch.bool)
        mask[ids] = True
        return mask

    def take(self, token: int) -> None:
        self.said.append(token)
        self.done = token in (END, self._last)


def led(constraint: Any, max_tokens: int = 8, **more: Any) -> ConstrainedAnswer:
    return ConstrainedAnswer(constraint, max_tokens, frozenset({END}), WORDS, str, **more)


def walk(constraint: Any, *tokens: int) -> None:
    for token in tokens:
        assert constraint.permits(token) and not constraint.refuses(token)
        constraint.take(token)


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_is_complete_where_its_guide_is_or_where_it_may_end(packed: bool) -> None:
    whole = led(Counting(packed=packed))
    walk(whole, 1, 2, 3, 4)
    assert not whole.done and not whole.permits(3)
    walk(whole, 5)
    assert whole.done
    ended = led(Counting(packed=packed))
    walk(ended, 1, 2, 3, END)
    assert ended.done and whole.longest == 8


def test_an_answer_that_is_cut_is_complete_if_it_may_end_there_and_else_an_error_with_what_was_said() -> None:
    walk(complete := led(Counting(), max_tokens=3), 1, 2, 3)
    assert complete.done
    short = led(Counting(), max_tokens=2)
    walk(short, 1)
    with pytest.raises(ConstraintError, match=r"max_tokens=2 was reached.*raise max_tokens.*\[1, 2\]") as cut:
        short.take(2)
    assert cut.value.text == "[1, 2]"
    again = pickle.loads(pickle.dumps(cut.value))
    assert (again.text, str(again)) == (cut.value.text, str(cut.value))


def test_a_text_to_stop_at_ends_it_only_where_it_may_end() -> None:
    constraint = led(Counting(), stop_complete=lambda token: token in (2, 4))
    walk(constraint, 1, 2)
    assert not constraint.done
    walk(constraint, 3, 4)
    assert constraint.done


@pytest.mark.parametrize(
    ("allowed", "why"),
    [
        ([], "allows no token"),
        (torch.zeros(WORDS, dtype=torch.bool), "allows no token"),
        ([1, WORDS], "ids run from 0 to 11"),
        ([-1], "ids run from 0"),
        (torch.ones(WORDS + 1, dtype=torch.bool), "must be bool"),
        (torch.ones(WORDS), "must be bool"),
        (KeyError("oops"), "oops"),
    ],
)
def test_a_guide_that_allows_nothing_or_nonsense_fails_when_the_token_is_taken(allowed: Any, why: str) -> None:
    """Not before: nobody else's step is repeated for it."""

    class Wrong(Counting):
        def allowed(self) -> Allowed:
            if len(self.said) < 1:
                return [1]
            if isinstance(allowed, Exception):
                raise allowed
            return allowed

    constraint = led(Wrong())
    walk(constraint, 1)
    assert constraint.allowed() is None and not constraint.permits(2)
    with pytest.raises(ConstraintError, match=why) as failed:
        constraint.take(2)
    assert failed.value.text == "[1]", "the token that came in its place was never said"


class OneClose:
    rest: tuple[int, ...] = ()
    phase: Phase = "thoughts"

    def add(self, token: int) -> Phase:
        self.phase = "answer" if self.phase == "close" else "close" if token == 7 else self.phase
        return self.phase


def test_thoughts_come_first_and_then_the_guide() -> None:
    inner = Counting()
    constraint = ThinkingConstraint(3, (7,), frozenset({END}), OneClose(), led(inner))
    assert constraint.longest == 3 + 1 + BLANK_LINES + 8 and constraint.leader is constraint
    assert (
        constraint.allowed() is None
        and constraint.refuses(END)
        and constraint.allowed() == (7,)
        and not constraint.permits(3)
    )
    constraint.take(7)
    assert constraint.leader is inner and constraint.permits(1) and not constraint.permits(2)
    walk(constraint, 1, 2, 3, END)
    assert constraint.done


def test_bits_are_unpacked_as_they_were_packed() -> None:
    draw = random.Random(0)
    for vocabulary in (1, 31, 32, 33, 752, 1000):
        words = -(-vocabulary // 32)
        wanted = np.array([[draw.random() < 0.3 for _ in range(words * 32)] for _ in range(3)])
        bits = np.packbits(wanted, axis=1, bitorder="little").view(np.int32)
        assert torch.equal(unpack(bits, vocabulary), torch.from_numpy(wanted[:, :vocabulary]))
        assert torch.equal(unpack_on_device(bits, vocabulary, torch.device("cpu")), unpack(bits, vocabulary))


class Filler:
    """Allows one token in each row: what its constraint says."""

    vocabulary = 40

    def __init__(self) -> None:
        self.calls: list[int] = []

    def fill(self, constraints: Sequence[Any], device: torch.device) -> None:
        self.calls.append(len(constraints))
        for constraint in constraints:
            constraint.mask = torch.arange(self.vocabulary) == constraint.token


class Packed:
    def __init__(self, filler: Filler, token: int) -> None:
        self.filler, self.token, self.done = filler, token, False
        self.mask: Tensor | None = None

    def allowed(self) -> Allowed:
        return self.mask

    def take(self, token: int) -> None:
        self.mask = None


def test_masks_of_a_step_are_filled_together_and_once() -> None:
    filler, masks = Filler(), StepMasks(torch.device("cpu"))
    constraints = [ConstrainedAnswer(Packed(filler, token), 8, frozenset({END}), 40, str) for token in (3, 33, 7)]
    others = [None, led(Counting())]
    for _ in range(2):  # a step that is run again
        with masks.fill_during([*constraints, *others]):
            pass
        assert filler.calls == [3]
        for constraint, token in zip(constraints, (3, 33, 7), strict=True):
            mask = constraint.allowed()
            assert isinstance(mask, Tensor) and mask.nonzero().flatten().tolist() == [token]
    sampler = TokenSampler(Sampling(), 0, constraint=constraints[1])
    logits = torch.randn(40)
    assert sampler.choose(logits).token == 33
    sampler.take(33)
    with masks.fill_during(constraints):
        pass
    assert filler.calls == [3, 1], "the others still have theirs"


def test_masks_are_waited_for_though_the_step_fails() -> None:
    filler, masks = Filler(), StepMasks(torch.device("cpu"))
    constraint = ConstrainedAnswer(Packed(filler, 3), 8, frozenset({END}), 40, str)
    with pytest.raises(RuntimeError, match="the step"), masks.fill_during([constraint]):
        raise RuntimeError("the step")
    assert constraint.allowed() is not None


def test_a_description_of_a_guide_is_plain_and_keeps_its_order() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    for plain in ({"json_schema": schema}, {"regex": "a|b"}, {"grammar": 'start: "a"'}):
        sampling = Sampling(constraint=plain)
        assert sampling.constraint is not None and sampling.constraint.plain() == plain
        assert Sampling.model_validate_json(sampling.model_dump_json()) == sampling
        assert hash(sampling) == hash(Sampling(constraint=sampling.constraint))
    other = {"type": "object", "properties": {"a": {}, "b": {}}}
    assert Grammar.model_validate({"json_schema": schema}) != Grammar.model_validate({"json_schema": other})


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "must have one of"),
        ({"regexp": "a"}, "must have one of"),
        ({"regex": "a", "grammar": "b"}, "must have one of"),
        ({"regex": ""}, "at least 1"),
        ({"json_schema": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"json_schema": {"const": {1, 2}}}, "cannot be written as JSON"),
    ],
)
def test_what_describes_no_guide_is_refused(wrong: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Sampling(constraint=wrong)


def test_choices_and_a_guide_are_not_both_the_answer() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        Sampling(choices=("a",), constraint={"regex": "a"})
