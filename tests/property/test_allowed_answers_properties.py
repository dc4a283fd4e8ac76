"""Whatever a model prefers, its answer is one of the allowed, and no better one was within reach."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.byte_model import ByteModel

from choreo_agents.engine.constraints import answer_constraint, answer_paths
from choreo_agents.runtime.request import Decoding
from choreo_agents.sampling import AnswerPaths, Sampling, TokenSampler

LETTERS = "ab: é🙂"
LONGER = ("ab", " a", "é", "b: ", ": a", " é🙂", "b:")
words = st.text(LETTERS, min_size=1, max_size=5)


@st.composite
def lists_of_choices(draw: st.DrawFn) -> tuple[str, ...]:
    """Some of which go on from others."""
    choices = draw(st.lists(words, min_size=1, max_size=4))
    for tail in draw(st.lists(words, max_size=3)):
        choices.append(draw(st.sampled_from(choices)) + tail)
    return tuple(draw(st.permutations(choices)))


class Case:
    """A model of random logits, which like the letters and the end, and a decode of it."""

    def __init__(self, choices: tuple[str, ...], lead: str, stop: tuple[str, ...], used: int, extra: int) -> None:
        self.model = ByteModel(LONGER, used, ends=2)
        self.sampling = Sampling(choices=choices, answer_prefix=lead, stop=stop, max_tokens=1000)
        self.end = self.model.adapter.end_tokens[0]
        self.ends = frozenset(self.model.adapter.end_tokens)
        paths = self.paths()
        self.sampling = self.sampling.model_copy(update={"max_tokens": paths.needed + extra})

    def paths(self) -> AnswerPaths:
        paths = answer_paths(self.model.loaded(), self.sampling, self.ends)
        assert paths is not None
        return paths

    def logits(self, seed: int) -> torch.Tensor:
        size = self.model.adapter.vocabulary_size
        logits = torch.randn(self.sampling.max_tokens, size, generator=torch.Generator().manual_seed(seed))
        liked = [*{byte for letter in LETTERS for byte in letter.encode()}, *range(256, size)]
        logits[:, liked] += 3.0
        return logits

    def decode(self, logits: torch.Tensor, sampling: Sampling, seed: int = 0) -> list[int]:
        constraint = answer_constraint(self.model.loaded(), sampling, self.paths())
        decoding = Decoding(sampling, TokenSampler(sampling, seed, constraint=constraint), self.ends, (self.end,))
        sampled: list[int] = []
        while not sampled or not decoding.ends(sampled):
            sampled.append(decoding.sampler.choose(logits[len(sampled)]).token)
            decoding.sampler.take(sampled[-1])
        assert len(sampled) + 1 <= decoding.longest
        return sampled

    def oracle(self, logits: torch.Tensor) -> list[int]:
        """The same for greedy decoding: in texts and whole sequences, from the start after every token."""
        model, sampling, paths = self.model, self.sampling, self.paths()
        out: list[int] = []
        led: list[tuple[int, ...]] | None = None
        while sampling.answer_prefix and not model.decode(out).endswith(sampling.answer_prefix):
            step = logits[len(out)]
            stopped = int(step.argmax()) in self.ends or any(stop in model.decode(out) for stop in sampling.stop)
            if led is None and (stopped or sampling.max_tokens - len(out) <= paths.needed):
                begun = max(
                    have
                    for have in range(len(out) + 1)
                    if any(path[:have] == tuple(out[len(out) - have :]) and len(path) > have for path in paths.lead)
                )
                kept = tuple(out[len(out) - begun :])
                led = [(*out[: len(out) - begun], *path) for path in paths.lead if path[:begun] == kept]
            out.append(int(step.argmax()) if led is None else best(step, led, out))
        ended = {path for path in paths.choices if any(path != q and path == q[: len(path)] for q in paths.choices)}
        whole = [(*out, *path) for path in paths.choices - ended]
        whole += [(*out, *path, end) for path in ended for end in self.ends]
        while tuple(out) not in whole:
            out.append(best(logits[len(out)], whole, out))
        return out


def best(step: torch.Tensor, sequences: list[tuple[int, ...]], out: list[int]) -> int:
    """The likeliest token that goes on with one of these sequences."""
    at = len(out)
    return max({s[at] for s in sequences if s[:at] == tuple(out) and len(s) > at}, key=lambda t: float(step[t]))


cases = st.builds(
    Case,
    lists_of_choices(),
    st.text(LETTERS, max_size=4),
    st.lists(words, max_size=1).map(tuple),
    st.integers(0, len(LONGER)),
    st.integers(0, 25),
)


@given(cases, st.integers(0, 2**32), st.sampled_from([0.0, 0.7, 2.0]), st.integers(0, 3), st.floats(0.1, 1.0))
def test_an_answer_is_always_there(case: Case, seed: int, temperature: float, k: int, p: float) -> None:
    sampling = case.sampling.model_copy(
        update={"temperature": temperature, "top_k": k, "top_p": p, "repetition_penalty": 1.2}
    )
    sampled = case.decode(case.logits(seed), sampling, seed)
    assert len(sampled) <= sampling.max_tokens
    assert case.ends.isdisjoint(sampled[:-1]), "nothing ends before the answer does"
    said = case.model.decode(sampled)
    spelled = [sampling.answer_prefix + space + choice for choice in sampling.choices for space in ("", " ")]
    assert any(said.endswith(each) for each in spelled) if sampling.answer_prefix else said in spelled


@given(cases, st.integers(0, 2**32))
def test_greedy_takes_the_likeliest_that_leads_to_an_answer(case: Case, seed: int) -> None:
    logits = case.logits(seed)
    assert case.decode(logits, case.sampling) == case.oracle(logits)


@given(cases, st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_answer(case: Case, seed: int) -> None:
    sampling, logits = case.sampling.model_copy(update={"temperature": 1.0}), case.logits(seed)
    assert case.decode(logits, sampling, seed) == case.decode(logits, sampling, seed)
