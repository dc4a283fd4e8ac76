"""Tokens of a batch against the slow choice of each row, and against the same rows in other batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support import sampling as oracle
from transformers import RepetitionPenaltyLogitsProcessor

from choreo_agents.sampling import (
    BatchSampler,
    Draw,
    Sampling,
    TokenSampler,
)
from choreo_agents.sampling import draw as draw_module
from choreo_agents.sampling.draw import CountedTokens
from choreo_agents.sampling.noise import noise_key


@dataclass(frozen=True)
class Asked:
    """A row of logits, and what is asked of it."""

    logits: torch.Tensor
    sampling: Sampling
    seed: int
    step: int
    allowed: tuple[int, ...] | None
    before: tuple[int, ...] = ()
    sampled: tuple[int, ...] = ()

    def row(self) -> torch.Tensor:
        return oracle.drawn_from(self.logits, self.sampling, self.before, self.sampled, self.allowed)

    def draw(self) -> Draw:
        mask = None
        if self.allowed is not None:
            mask = torch.zeros(len(self.logits), dtype=torch.bool)
            mask[list(self.allowed)] = True
        counted = CountedTokens(self.sampling, self.before, self.logits.device)
        for token in self.sampled:
            counted.add(token)
        return Draw(self.sampling, noise_key(self.seed, self.step), mask, counted.penalties())


@st.composite
def sampled_by(draw: st.DrawFn) -> Sampling:
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.6, 1.0, 1.5, 8.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 20, 128, 129, 500, 10_000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.97, 0.9999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.0, 0.03, 0.4, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 2.0, -1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.1, -2.0])),
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Asked]:
    words = draw(st.sampled_from([1, 2, 7, 127, 128, 129, 300, 1100, 1280, 4096]))
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        logits = torch.randn(words, generator=generator) * draw(st.sampled_from([0.0, 0.5, 2.0, 6.0, 30.0]))
        if draw(st.booleans()):
            logits = (logits * 4).round() / 4  # ties, as bf16 makes them
        if draw(st.integers(0, 3)) == 0:
            logits[1::3] = float("-inf")
        ids = st.integers(0, words - 1)
        allowed = draw(st.none() | st.lists(ids, min_size=1, max_size=8).map(tuple))
        before, sampled = (tuple(draw(st.lists(ids, max_size=8))) for _ in range(2))
        step = draw(st.integers(0, 9))
        rows.append(Asked(logits, draw(sampled_by()), draw(st.integers()), step, allowed, before, sampled))
    return rows


def drawn(rows: list[Asked]) -> list[int]:
    return BatchSampler().draw(torch.stack([row.logits for row in rows]), [row.draw() for row in rows])


@given(batches())
def test_a_batch_draws_what_each_row_draws_slowly(rows: list[Asked]) -> None:
    for asked, token in zip(rows, drawn(rows), strict=True):
        row = asked.row()
        wanted = oracle.choice(row, asked.sampling, asked.seed, asked.step)
        if wanted != token and asked.sampling.temperature > 0.0:
            # Single precision and double may differ about what stands on a filter's very edge.
            assume(oracle.probabilities(row, asked.sampling)[1] > 1e-5)
        assert token == wanted


@contextmanager
def changed(module: object, **constants: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(module, name, value)
        yield


@given(batches(), st.randoms(use_true_random=False))
def test_a_row_draws_the_same_alone_and_in_any_batch_and_order(rows: list[Asked], random: object) -> None:
    together = drawn(rows)
    assert [drawn([row])[0] for row in rows] == together
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert drawn([rows[place] for place in order]) == [together[place] for place in order]
    some = order[::2]
    logits = torch.stack([row.logits for row in rows])
    assert BatchSampler().draw(logits, [rows[place].draw() for place in some], some) == [together[row] for row in some]


@given(batches())
def test_where_it_is_looked_for_changes_no_choice(rows: list[Asked]) -> None:
    """All scored, nothing cut out, every row a copy: the same to the last bit."""
    usual = drawn(rows)
    with changed(draw_module, _MARGIN=1e9):
        assert drawn(rows) == usual
    with changed(draw_module, CHUNK=1):
        assert drawn(rows) == usual
    with changed(draw_module, CHUNK=1 << 20):
        assert drawn(rows) == usual
    with changed(draw_module, LOW=math.inf):
        assert drawn(rows) == usual


@pytest.mark.parametrize("size", [20_001, 20_480])
@pytest.mark.parametrize("coarse", [False, True])
def test_a_large_vocabulary_is_drawn_from_as_slowly(coarse: bool, size: int) -> None:
    """So large that words are left out, by a top-k and by a nucleus; as bf16 rounds logits; of chunks, and not."""
    kinds = (
        {"top_k": 20},
        {"top_k": 20, "top_p": 0.9},
        {"top_p": 0.9},
        {"top_p": 0.6},
        {"min_p": 0.01},
        {},
        {"top_p": 0.9, "presence_penalty": 2.0, "repetition_penalty": 1.2},
        {"top_p": 0.7, "min_p": 0.001},
        {"top_k": 300, "top_p": 0.95},
        {"temperature": 0.0},
        {"top_k": 20, "frequency_penalty": 1.0},
    )
    rows = []
    for place, kind in enumerate(kinds):
        generator = torch.Generator().manual_seed(place)
        logits = torch.randn(size, generator=generator) * 5
        logits = logits.bfloat16().float() if coarse else logits
        said = tuple(logits.topk(30).indices[::2].tolist())
        rows.append(Asked(logits, Sampling(**({"temperature": 1.0} | kind)), place, 0, None, said[:5], said))
    assert drawn(rows) == [oracle.choice(row.row(), row.sampling, row.seed, row.step) for row in rows]


@given(st.integers(0, 2**32), st.integers(1, 60), st.booleans(), st.sampled_from([50 * 128, 50 * 128 + 77]))
def test_as_many_as_are_wanted_reach_the_bound(seed: int, count: int, coarse: bool, words: int) -> None:
    row = torch.randn(words, generator=torch.Generator().manual_seed(seed))
    row = row.round() if coarse else row
    assert draw_module.bound_of_highest(row, count) <= float(row.topk(count).values[-1])


@pytest.mark.parametrize(("threads", "words"), [(2, 70_001), (2, 70_016), (3, 70_016)])
def test_any_number_of_threads_draws_the_same(threads: int, words: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, words, generator=generator) * torch.tensor([[1.0], [3.0], [6.0], [1.0], [3.0], [6.0]])
    kinds = ({"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}, {}, {"min_p": 0.01}, {"top_p": 0.3}, {"top_p": 0.999})
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            draws = [
                [Draw(Sampling(temperature=1.0, **kind), noise_key(seed, 0)) for kind in kinds] for seed in range(5)
            ]
            found.append([BatchSampler().draw(logits, each) for each in draws])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@given(st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12), st.data())
def test_a_penalty_is_the_one_of_hugging_face(values: list[float], data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=8))
    penalty = data.draw(st.floats(0.25, 4.0))
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), torch.tensor([values]))[0]
    sampler = TokenSampler(Sampling(repetition_penalty=penalty), 0, tokens)
    assert wanted[sampler.choose(torch.tensor(values)).token] == wanted.max()
