"""The filters against plain sorting."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from choreo_agents.sampling import Sampling, TokenSampler
from choreo_agents.sampling.filters import apply_filters, keep_min_p, keep_top_k, keep_top_p, penalise

vectors = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12)


@given(vectors, st.integers(0, 14))
def test_top_k_keeps_what_is_not_below_the_kth(values: list[float], k: int) -> None:
    kept = keep_top_k(torch.tensor(values), k).tolist()
    least = sorted(values, reverse=True)[k - 1] if 0 < k < len(values) else min(values)
    assert kept == [value if value >= least else float("-inf") for value in values]


@given(vectors, st.floats(0.01, 1.0))
def test_top_p_keeps_the_fewest_that_reach_it(values: list[float], p: float) -> None:
    logits = torch.tensor(values)
    probabilities = logits.double().softmax(-1).tolist()
    ranked = sorted(probabilities, reverse=True)
    sums = [sum(ranked[: i + 1]) for i in range(len(ranked))]
    assume(p == 1.0 or all(abs(part - p) > 1e-5 for part in sums))
    wanted = next((i + 1 for i, part in enumerate(sums) if part >= p), len(ranked)) if p < 1.0 else len(ranked)
    kept = keep_top_p(logits, p)
    survivors = sorted((q for q, ok in zip(probabilities, kept.isfinite().tolist(), strict=True) if ok), reverse=True)
    assert survivors == ranked[:wanted]
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])


@given(vectors, st.floats(0.05, 3.0), st.integers(0, 14), st.floats(0.01, 1.0))
def test_the_likeliest_token_always_stays(values: list[float], temperature: float, k: int, p: float) -> None:
    kept = apply_filters(torch.tensor(values), temperature, k, p)
    assert kept.isfinite().any() and kept.max() == kept[torch.tensor(values).argmax()]


@given(vectors, st.integers(), st.integers(0, 5), st.floats(0.1, 1.0))
def test_a_token_that_was_filtered_out_is_never_chosen(values: list[float], seed: int, k: int, p: float) -> None:
    logits = torch.tensor(values)
    sampler = TokenSampler(Sampling(temperature=1.5, top_k=k, top_p=p), seed)
    for _ in range(5):
        chosen = sampler.choose(logits)
        sampler.take(chosen.token)
        assert apply_filters(logits, 1.5, k, p)[chosen.token].isfinite()


@given(vectors, st.floats(0.0, 1.0))
def test_min_p_keeps_what_is_likely_enough(values: list[float], p: float) -> None:
    probabilities = torch.tensor(values).double().softmax(-1).tolist()
    least = p * max(probabilities)
    assume(all(abs(each - least) > 1e-9 or each == max(probabilities) for each in probabilities))
    kept = keep_min_p(torch.tensor(values, dtype=torch.float64), p).isfinite().tolist()
    assert kept == [each >= least or each == max(probabilities) for each in probabilities]


@given(vectors, st.lists(st.integers(0, 11), max_size=8), st.floats(0.25, 4.0))
def test_a_penalty_is_the_one_of_hugging_face(values: list[float], tokens: list[int], penalty: float) -> None:
    tokens = [token for token in tokens if token < len(values)]
    wanted = torch.tensor([values])
    if tokens:
        wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), wanted)
    torch.testing.assert_close(penalise(torch.tensor(values), tokens, penalty), wanted[0])
