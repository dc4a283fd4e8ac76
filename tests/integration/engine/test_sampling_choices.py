"""What a call may ask of sampling: log-probabilities, texts to stop at, penalties, several answers."""

from __future__ import annotations

import pytest
import torch
from conftest import MakeEngine
from support.exact import TOLERANCE, doubled, exactly, plain_model
from transformers import AutoModelForCausalLM

from choreo_agents import Decode, Engine, Sampling, StreamedToken
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel

WARM = Sampling(max_tokens=8, stop_tokens=(), temperature=1.0, seed=3)


def with_(sampling: Sampling, **changes: object) -> Sampling:
    return sampling.model_copy(update=changes)


def test_log_probabilities_are_the_models_own(engine: Engine, tiny_path: str) -> None:
    """Of before temperature, filters and penalty, for sampled and for forced tokens."""
    root = engine.prefill([5, 6, 9])
    handle = engine.decode([7], [root], sampling=with_(WARM, logprobs=3, top_k=4, repetition_penalty=1.5))
    tokens = [5, 6, 9, *engine.tokens(handle)]
    model = doubled(plain_model(tiny_path))
    with exactly():
        wanted = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    chosen = engine.logprobs(handle)
    assert [c.token for c in chosen] == tokens[4:]
    for place, one in enumerate(chosen, start=3):
        assert one.logprob == pytest.approx(float(wanted[place, one.token]), abs=TOLERANCE)
        best = wanted[place].topk(3)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
    forced = engine.decode([7], [root], sampling=Sampling(forced_token_ids=(8, 8), logprobs=0))
    assert [(c.token, c.top) for c in engine.logprobs(forced)] == [(8, ()), (8, ())]
    assert engine.logprobs(forced)[0].logprob == pytest.approx(float(wanted[3, 8]), abs=TOLERANCE)


def test_nobody_who_does_not_ask_pays_for_log_probabilities(engine: Engine) -> None:
    handle = engine.decode([7], sampling=WARM)
    assert {c.logprob for c in engine.logprobs(handle)} == {None}
    assert engine.logprobs(engine.prefill([5])) == ()


def test_a_stream_brings_them_with_each_token(engine: Engine) -> None:
    items = list(engine.stream([7], sampling=with_(WARM, logprobs=1)))
    assert [i.chosen for i in items[:-1] if isinstance(i, StreamedToken)] == list(engine.logprobs(items[-1]))


def test_a_memoised_answer_streams_what_was_sampled_and_no_more(engine: Engine) -> None:
    call = {"sampling": WARM, "turn_suffix": [2, 11], "idempotency_key": "m"}
    first, again = list(engine.stream([7], **call)), list(engine.stream([7], **call))
    assert first == again and len(first) == 9


def test_a_decode_stops_where_a_text_is_complete(embedded: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(embedded)
    free = Sampling(temperature=1.0, seed=5, max_tokens=20, stop_tokens=())
    whole = engine.text(engine.decode("<|assistant|>", sampling=free), special=False)
    for stop in (whole[-6:], whole[8:12], whole[0]):
        sampling = with_(free, stop=("no such text", stop))
        cut = engine.text(engine.decode("<|assistant|>", sampling=sampling), special=False)
        end = whole.index(stop) + len(stop)
        assert whole.startswith(cut) and len(cut) >= end
        assert " " not in cut[end:].strip(), "the token that completes it is the last"
    unstopped = engine.decode("<|assistant|>", sampling=with_(free, stop=("no such text",)))
    assert engine.text(unstopped, special=False) == whole


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_text_to_stop_at_may_span_tokens_and_bytes(embedded: LoadedModel, split: int) -> None:
    from choreo_agents.engine.constraints import TextStop

    tokens = embedded.encode("Zoë says: stöp here, now")
    text = embedded.decode(tokens, special=False)
    wanted = "stöp"[: split + 1]
    stop = TextStop(embedded, [wanted, "\u2603"])
    at = next(i for i, token in enumerate(tokens) if stop.ends_with(token))
    assert wanted in embedded.decode(tokens[: at + 1], special=False)
    assert wanted not in embedded.decode(tokens[:at], special=False)
    assert text.index(wanted) < len(text)


def test_a_penalty_counts_the_view_and_the_answer(engine: Engine) -> None:
    """With a penalty that leaves nothing of what was said, no token comes twice, nor one of the view."""
    free = Sampling(max_tokens=30, stop_tokens=())
    root = engine.prefill(list(range(20, 60)))
    plain = engine.tokens(engine.decode([7], [root], sampling=free))
    assert len(set(plain)) < len(plain), "a greedy random model repeats itself"
    fresh = engine.tokens(engine.decode([7], [root], sampling=with_(free, repetition_penalty=1e6)))
    assert len(set(fresh)) == len(fresh) and not set(fresh) & set(range(20, 60))


def test_presence_and_frequency_count_the_answer_and_not_the_view(engine: Engine) -> None:
    free = Sampling(max_tokens=30, stop_tokens=())
    plain = engine.tokens(engine.decode([7], sampling=free))
    first = engine.tokens(engine.decode([7], [engine.prefill(plain[1:])], sampling=with_(free, max_tokens=1)))
    seen = engine.prefill(plain[1:])
    penalised = with_(free, presence_penalty=2.0, frequency_penalty=2.0)
    assert engine.tokens(engine.decode([7], [seen], sampling=with_(penalised, max_tokens=1))) == first
    answer = engine.tokens(engine.decode([7], sampling=penalised))[1:]
    assert answer[0] == plain[1] and len(set(answer)) > len(set(plain[1:]))


def test_greedy_with_a_penalty_is_what_generate_gives(engine: Engine, tiny_path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_path)
    prompt = [5, 6, 9, 7]
    wanted = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, repetition_penalty=1.3, eos_token_id=None
    )[0].tolist()
    root = engine.prefill(prompt[:3])
    sampling = Sampling(max_tokens=12, stop_tokens=(), repetition_penalty=1.3)
    assert prompt[:3] + engine.tokens(engine.decode(prompt[3:], [root], sampling=sampling)) == wanted


def test_n_answers_share_the_view_and_nothing_else(engine: Engine) -> None:
    root = engine.prefill(list(range(20, 60)))
    before = engine.stats().tokens_encoded
    *several, _ = engine.decode([Decode([7], [root], sampling=with_(WARM, n=3)), Decode([8], [root], sampling=WARM)])
    one = engine.decode([7], [root], sampling=WARM)
    assert len({engine.text(handle) for handle in several}) == 3
    assert several[0] == one, "the first has the call's own seed"
    assert engine.stats().tokens_encoded == before + 5 * (1 + 8), "the view is encoded once"
    again = engine.decode([Decode([7], [root], sampling=with_(WARM, n=3))])
    assert again == several


def test_n_answers_without_a_seed_differ(engine: Engine) -> None:
    answers = engine.decode([Decode([7], sampling=with_(WARM, seed=None, n=4), idempotency_key="m")])
    assert len(set(answers)) == 4
    assert engine.decode([Decode([7], sampling=with_(WARM, seed=None, n=4), idempotency_key="m")]) == answers


def test_several_answers_have_to_be_asked_for_in_a_list(engine: Engine) -> None:
    for call in (engine.decode, engine.stream, engine.astream):
        with pytest.raises(InvalidRequestError, match=r"decode\(\[Decode"):
            call([7], sampling=with_(WARM, n=2))
