"""Grammars over the tokens of different tokenizers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.templates import tokenizer_for
from support.wide_tokens import WideTokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from choreo_agents.errors import ConstraintError, GrammarError, InvalidRequestError
from choreo_agents.models.constraints import Grammars
from choreo_agents.sampling import ConstrainedAnswer, Grammar
from choreo_agents.testing import Script

JSON = Grammar.model_validate({"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 8}}})
SAID = ('["a", "Zoë 🙂"]', ' ["a b"]', "[]")


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Words behind a mark for their space, bytes for what is unknown, and tags that are called no special tokens."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        '"',
        "[",
        "]",
        ",",
        '▁"',
        "▁[",
    ]
    core = Tokenizer(
        BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    made.add_tokens(["<tool_call>", "[CALL]"], special_tokens=False)
    return made


def tokenizers() -> dict[str, Any]:
    made: dict[str, Any] = {family: tokenizer_for(family) for family in ("Qwen 3", "GLM-4.5")}
    return {**made, "sentence pieces": sentence_pieces(), "wide": WideTokenizer(4_000)}


@pytest.mark.parametrize("name", ["Qwen 3", "GLM-4.5", "sentence pieces", "wide"])
def test_what_a_grammar_allows_can_be_said_and_nothing_else(name: str) -> None:
    tokenizer = tokenizers()[name]
    end = getattr(tokenizer, "eos_token_id", None) or tokenizer.end
    vocabulary = len(tokenizer) + 5
    grammars = Grammars(tokenizer, vocabulary, [end])
    for text in SAID:
        tokens = [*tokenizer.encode(text)] if name == "wide" else tokenizer.encode(text, add_special_tokens=False)
        constraint = grammars.compile(JSON)(frozenset({end}))
        for token in tokens:
            allowed = constraint.allowed()
            assert isinstance(allowed, torch.Tensor) and len(allowed) == vocabulary
            assert allowed[token] and not allowed[end] and not allowed[len(tokenizer) :].any() and not constraint.done
            constraint.take(token)
        assert constraint.done
    anything = grammars.compile(Grammar(kind="regex", text="(.|\n)*"))(frozenset({end})).allowed()
    assert isinstance(anything, torch.Tensor) and anything[end]
    if name != "wide":
        added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
        assert not any(anything[token] for token in added - {end}), "a tag is no text, whatever it is called"
        assert name != "sentence pieces" or len(added) == 4


def test_what_no_token_can_say_is_an_error_of_its_own_call() -> None:
    """A vocabulary without digits."""
    letters = [*pre_tokenizers.ByteLevel.alphabet()]
    words = {letter: number for number, letter in enumerate(letter for letter in letters if not letter.isdigit())}
    core = Tokenizer(BPE({**words, "</s>": len(words)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    constraint = Grammars(tokenizer, len(tokenizer), [len(words)]).compile(Grammar(kind="regex", text="a[0-9]b"))(
        frozenset()
    )
    answer = ConstrainedAnswer(constraint, 9, frozenset(), len(tokenizer), tokenizer.decode)
    answer.take(words["a"])
    assert answer.allowed() is None
    with pytest.raises(ConstraintError, match="allows nothing") as failed:
        answer.take(words["b"])
    assert failed.value.text == "a"


def test_tokenizers_whose_tokens_are_no_bytes_are_refused() -> None:
    core = Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    words = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    with pytest.raises(InvalidRequestError, match="use a model with byte-level tokens"):
        Grammars(words, 2, [1])
    with pytest.raises(InvalidRequestError, match=r"save the model with a tokenizer.json"):
        Grammars(object(), 2, [1])  # type: ignore[arg-type]


def test_a_script_says_what_a_grammar_allows() -> None:
    model = Script(default="-").model
    constraint = model.grammars.compile(JSON)(frozenset({1}))
    for token in model.encode('["a long", "Zoë"]'):
        assert getattr(constraint, "permits")(token) and not getattr(constraint, "permits")(1)  # noqa: B009
        constraint.take(token)
    assert constraint.done
    with pytest.raises(ValueError, match="satisfy"):
        model.grammars.compile(JSON)(frozenset({1})).take(model.encode("nonsense")[0])


def test_a_grammar_without_words_of_its_own_is_refused_or_allows_nothing() -> None:
    """A rule that only ever calls itself has no first word."""
    grammars = Grammars(WideTokenizer(600), 600, [599])
    endless = Grammar(kind="grammar", text='start: start "a"')
    try:
        constraint = grammars.compile(endless)(frozenset({599}))
    except GrammarError:
        return
    with pytest.raises(ValueError):
        constraint.allowed()


def test_masks_over_a_wide_vocabulary_are_of_its_own_words() -> None:
    wide = WideTokenizer(3_000)
    assert len(json.loads(wide.to_str())["model"]["vocab"]) == 2_999 and wide.encode("é\n ") == [
        *wide.encode("é"),
        *wide.encode("\n"),
        *wide.encode(" "),
    ]
