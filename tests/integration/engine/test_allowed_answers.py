"""Answers out of a list: votes that need no parsing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from support.byte_model import ByteModel
from support.tiny import save_tiny_llama
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from choreo_agents import Decode, Engine, Sampling, StreamedToken
from choreo_agents.engine.constraints import answer_paths
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel, PromptText, load_model

NAMES = ("Ann", "Bob", "Zoë 🙂")
ROOT = "<s><|system|> Notes: Ann has 3 red kites. Bob has 5 blue boats.<|end|><|user|> Who has boats?<|end|>"
HEADER = "<|assistant|>"
VOTE = Sampling(temperature=1.0, max_tokens=30, choices=NAMES, answer_prefix="I vote for")


def with_(sampling: Sampling, **changes: object) -> Sampling:
    return sampling.model_copy(update=changes)


def spelled(sampling: Sampling) -> list[str]:
    return [sampling.answer_prefix + space + choice for choice in sampling.choices for space in ("", " ")]


@pytest.fixture
def talker(embedded: LoadedModel, make_engine: MakeEngine) -> Engine:
    return make_engine(embedded)


def said(engine: Engine, handle: object, *, special: bool = False) -> str:
    """What was generated: all but the header."""
    return engine.model.decode(engine.tokens(handle)[len(engine.model.encode(HEADER)) :], special=special)


def test_an_answer_is_one_of_the_choices_and_then_the_turn_ends(talker: Engine) -> None:
    root = talker.prefill(ROOT)
    for seed in range(5):
        sampling = with_(VOTE, answer_prefix="", seed=seed)
        text = said(talker, talker.decode(HEADER, [root], sampling=sampling, turn_suffix="<|end|>"), special=True)
        assert text.removesuffix("<|end|>") in spelled(sampling) and text.count("<|end|>") == 1


def test_the_model_chooses_by_what_it_reads(talker: Engine) -> None:
    """Greedy, the embedded model answers the question; told of another owner, it answers otherwise."""
    choice = Sampling(choices=("red", "blue", "green"))
    for color in choice.choices:
        root = talker.prefill(f"<s><|system|> Notes: Bob has 5 {color} boats.<|end|><|user|> What has Bob?<|end|>")
        handle = talker.decode("<|assistant|> Bob has 5", [root], sampling=choice)
        assert talker.text(handle, special=False).endswith(f"5 {color}")


@pytest.mark.parametrize("lead", ["I vote for", "I vote for:", "ö"])
def test_thoughts_come_before_the_lead_and_the_answer_after(talker: Engine, lead: str) -> None:
    root = talker.prefill(ROOT)
    for seed in range(4):
        sampling = with_(VOTE, answer_prefix=lead, seed=seed)
        handle = talker.decode(HEADER, [root], sampling=sampling, turn_suffix="<|end|>")
        text = said(talker, handle)
        assert text.endswith(tuple(spelled(sampling))) and text.count(lead) == 1
        assert len(talker.logprobs(handle)) <= 30
        assert said(talker, handle, special=True) == f"{text}<|end|>"


def test_a_lead_that_the_model_writes_itself_is_not_written_again(talker: Engine) -> None:
    """What was sampled freely, cut after some word, is a lead that the same seed comes to by itself."""
    root, free = talker.prefill(ROOT), Sampling(temperature=1.0, seed=2, max_tokens=12, stop_tokens=())
    whole = said(talker, talker.decode(HEADER, [root], sampling=free))
    lead = whole[: whole.index(" ", 8)][-6:]
    choosing = with_(free, choices=NAMES, answer_prefix=lead, max_tokens=40)
    text = said(talker, talker.decode(HEADER, [root], sampling=choosing))
    assert text.startswith(whole[: whole.index(lead) + len(lead)]) and text.count(lead) == 1
    assert text.endswith(tuple(spelled(choosing)))


def test_a_text_to_stop_at_ends_the_thoughts_only(talker: Engine) -> None:
    root = talker.prefill(ROOT)
    sampling = with_(VOTE, stop=(".", "Bob", "a", " "), choices=("Bob. a", "Ann. a"), temperature=0.0)
    text = said(talker, talker.decode(HEADER, [root], sampling=sampling))
    assert text.endswith(tuple(spelled(sampling)))
    free, _, _ = text.rpartition(sampling.answer_prefix)
    assert sum(free.rstrip().count(stop) for stop in (".", "Bob")) <= 1


def test_a_stream_ends_with_the_answer(talker: Engine) -> None:
    root, sampling = talker.prefill(ROOT), with_(VOTE, seed=4, logprobs=0)
    handle = talker.decode(HEADER, [root], sampling=sampling, turn_suffix="<|end|>")
    *items, last = talker.stream(HEADER, [root], sampling=sampling, turn_suffix="<|end|>")
    assert last == handle
    assert [item.chosen for item in items if isinstance(item, StreamedToken)] == list(talker.logprobs(handle))
    assert "".join(item.text for item in items if isinstance(item, StreamedToken)).endswith(tuple(spelled(sampling)))


def test_a_batch_gives_what_each_call_gives_alone(talker: Engine) -> None:
    root = talker.prefill(ROOT)
    samplings = [
        with_(VOTE, seed=1),
        Sampling(temperature=1.0, seed=2, max_tokens=20),
        with_(VOTE, seed=3, answer_prefix=""),
        Sampling(max_tokens=9),
        with_(VOTE, seed=5, temperature=0.0),
    ]
    calls = [Decode(HEADER, [root], sampling=sampling, turn_suffix="<|end|>") for sampling in samplings]
    alone = [talker.decode([call])[0] for call in calls]
    assert talker.decode(calls) == alone


def test_n_answers_are_each_one_of_the_choices(talker: Engine) -> None:
    root, sampling = talker.prefill(ROOT), with_(VOTE, n=6, seed=1)
    votes = talker.decode([Decode(HEADER, [root], sampling=sampling)])
    assert all(said(talker, vote).endswith(tuple(spelled(sampling))) for vote in votes)
    assert len({said(talker, vote) for vote in votes}) > 1


def test_a_choice_that_starts_another_may_be_the_answer(talker: Engine) -> None:
    root = talker.prefill(ROOT)
    sampling = Sampling(temperature=1.0, max_tokens=8, choices=("yes", "yes and no", "yes and yes"))
    for closing in ("<|end|>", ()):
        texts = {
            said(talker, talker.decode(HEADER, [root], sampling=with_(sampling, seed=seed), turn_suffix=closing))
            for seed in range(40)
        }
        assert {text.strip() for text in texts} == set(sampling.choices)


def test_the_step_of_the_last_token_is_the_last(talker: Engine) -> None:
    """No step is spent on finding out that a complete answer is complete."""
    root, before = talker.prefill(ROOT), talker.stats()
    handle = talker.decode(HEADER, [root], sampling=Sampling(choices=("Ann and Bob",), temperature=0.0))
    assert talker.text(handle, special=False).strip() == "Ann and Bob"
    sampled = len(talker.logprobs(handle))
    assert talker.stats().tokens_encoded - before.tokens_encoded == 1 + sampled


def test_forced_tokens_are_taken_as_they_are(engine: Engine) -> None:
    handle = engine.decode(
        [7], sampling=Sampling(forced_token_ids=(5, 6, 5), choices=("Ann",), answer_prefix="I vote for", max_tokens=1)
    )
    assert engine.tokens(handle) == [7, 5, 6, 5]


def test_text_twins_are_held_to_the_same_answers(tiny: LoadedModel, make_engine: MakeEngine) -> None:
    answers = set()
    for method in ("choreo", "baseline", "naive"):
        engine = make_engine(tiny, method=method)
        handle = engine.decode([7], [engine.prefill([5, 6])], sampling=with_(VOTE, seed=3))
        answers.add(engine.text(handle))
    assert len(answers) == 1 and answers.pop().endswith(tuple(spelled(VOTE)))


def test_an_answer_without_a_lead_reserves_no_more_than_it_can_take(embedded: LoadedModel, engine: Engine) -> None:
    free, room = Sampling(max_tokens=100_000), Sampling(max_tokens=100_000, choices=NAMES)
    with pytest.raises(InvalidRequestError, match="lower max_tokens"):
        engine.decode([7], sampling=free)
    assert engine.text(engine.decode([7], sampling=room)).endswith(NAMES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 8}, r"take up to \d+ tokens, but max_tokens is 8"),
        ({"choices": ("\ud800",)}, "cannot tokenize the choice"),
    ],
)
def test_what_can_never_be_answered_is_refused(engine: Engine, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.decode([7], sampling=with_(VOTE, **changes))
    assert engine.stats().tokens_encoded == 0


def test_choices_that_look_like_control_tokens_are_text(engine: Engine) -> None:
    sampling = Sampling(choices=("a<|end|>",), answer_prefix="<|user|>", temperature=0.0, max_tokens=99)
    said = engine.decode([7], sampling=sampling, turn_suffix="<|end|>")
    assert engine.text(said, special=False).endswith("a<|end|>") and "<|user|>" in engine.text(said, special=False)
    assert [token for token in engine.tokens(said)[1:] if token < 6] == engine.model.encode("<|end|>")


def test_a_choice_with_a_token_that_ends_the_message_is_refused(engine: Engine) -> None:
    [kites] = engine.model.encode(" kites")
    call = {"sampling": Sampling(choices=("red kites",), stop_tokens=(kites,))}
    with pytest.raises(InvalidRequestError, match="contains a token that ends the message"):
        engine.decode([7], **call)
    with pytest.raises(InvalidRequestError, match="contains a token that ends the message"):
        engine.decode([7], sampling=Sampling(choices=("a\nb",), stop_tokens=()), turn_suffix="\n")


def test_texts_that_a_tokenizer_would_change_or_drop_are_refused() -> None:
    class Lossy(ByteModel):
        def encode(self, text: str | PromptText) -> list[int]:
            return super().encode(str(text).lower().strip())

    model = Lossy().loaded()
    with pytest.raises(InvalidRequestError, match="its tokens decode to \\['ann'\\]"):
        answer_paths(model, Sampling(choices=("Ann",)), frozenset())
    with pytest.raises(InvalidRequestError, match="cannot be forced: its tokens decode to"):
        answer_paths(model, Sampling(choices=(" ",)), frozenset())
    assert answer_paths(model, Sampling(choices=("ann",)), frozenset()) is not None


def test_a_model_without_ends_cannot_say_that_the_shorter_choice_is_meant() -> None:
    model = ByteModel(ends=0).loaded()
    with pytest.raises(InvalidRequestError, match="pass stop_tokens"):
        answer_paths(model, Sampling(choices=("a", "ab")), frozenset())
    given = answer_paths(model, Sampling(choices=("a", "ab")), frozenset({3, -1, 10**9}))
    assert given is not None and given.ends == {3}, "what is no token is none to sample"


def test_the_models_own_ends_serve_where_none_are_given() -> None:
    model = ByteModel(ends=2)
    paths = answer_paths(model.loaded(), Sampling(choices=("a", "ab"), stop_tokens=()), frozenset())
    assert paths is not None and paths.ends == set(model.adapter.end_tokens)


def test_calls_without_choices_keep_their_seeds(engine: Engine) -> None:
    """The derived seed is of the JSON that earlier releases wrote; with choices it is another."""
    free = Sampling(temperature=1.0, max_tokens=4, stop_tokens=())
    named = free.model_dump(mode="json", by_alias=True)
    from choreo_agents.engine.request_builder import canonical

    assert list(named)[-3:] == ["choices", "lead", "guide"]
    later = (',"choices":[],"lead":"","guide":null', ',"presence_penalty":0.0,"frequency_penalty":0.0')
    assert canonical(free) == free.model_dump_json(by_alias=True).replace(later[0], "").replace(later[1], "")
    assert canonical(with_(free, presence_penalty=1.0)) != canonical(with_(free, frequency_penalty=1.0))
    assert canonical(with_(free, choices=("a",))) != canonical(with_(free, choices=("b",)))
    assert canonical(VOTE) != canonical(with_(VOTE, answer_prefix=""))


CORPUS = ["I vote for Bob. I vote for Ann, I vote for Zoë", "Ann and Bob vote: I vote", "for Bob or for Ann", "a b c"]

_FALLBACK: dict[str, dict[str, Any]] = {"bytes": {}, "metaspace": {"byte_fallback": True, "unk_token": "<unk>"}}


def _other_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Merges across words; or opens every text with a space, as SentencePiece does."""
    core = Tokenizer(BPE(**_FALLBACK[kind]))
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    if kind == "bytes":
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
        alphabet = []
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace()
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<unk>", "<s>", "</s>", *alphabet],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else [],
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    # Bytes that stand for themselves are text, not special: only a model made anew forgets that they were added.
    model = json.loads(core.to_str())["model"]
    core.model = BPE(model["vocab"], [tuple(pair) for pair in model["merges"]], **_FALLBACK[kind])
    plain = Tokenizer(core.model)
    plain.pre_tokenizer, plain.decoder = core.pre_tokenizer, core.decoder
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_other_tokenizers_spell_the_same_answers(tmp_path: Path, make_engine: MakeEngine, kind: str) -> None:
    tokenizer = _other_tokenizer(kind)
    save_tiny_llama(tmp_path, vocab_size=max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1))
    tokenizer.save_pretrained(tmp_path)
    engine = make_engine(load_model(tmp_path))
    whole, lead, name, bare = (engine.model.encode(text) for text in ("I vote for Bob", "I vote for", " Bob", "Bob"))
    assert whole != [*lead, *name] if kind == "bytes" else name == bare
    for choices in (NAMES, ("Ann", "Ann and Bob", "é☃")):
        for lead in ("", "I vote for"):
            for seed in range(6):
                sampling = Sampling(choices=choices, answer_prefix=lead, max_tokens=70, temperature=1.0, seed=seed)
                handle = engine.decode([5, 6], sampling=sampling, turn_suffix="</s>")
                text = engine.model.decode(engine.tokens(handle)[2:], special=False)
                assert text.endswith(tuple(spelled(sampling)))
                assert engine.tokens(handle)[-1] == tokenizer.eos_token_id
                assert lead or text in spelled(sampling)


def test_the_answer_is_the_likeliest_of_the_allowed(engine: Engine) -> None:
    """Greedy and for single tokens, that is what the model's own logits say."""
    names = ("red", "blue", "green", "black")
    seen: list[torch.Tensor] = []
    [handle] = engine.decode(
        [Decode([7], sampling=Sampling(choices=names), logits_callback=lambda x: seen.append(x.clone()))]
    )
    likely = {path: float(seen[0][path]) for name in names for path in engine.model.encode(f" {name}")}
    spelled_out = {engine.model.encode(name)[0]: float(seen[0][engine.model.encode(name)[0]]) for name in names}
    best = max(likely | spelled_out, key=(likely | spelled_out).__getitem__)
    assert engine.tokens(handle)[1] == best
