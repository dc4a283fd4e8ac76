"""Tokens become text as they come, characters whole."""

from __future__ import annotations

from typing import cast

import pytest
from support.byte_model import ByteModel
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from choreo_agents.engine.constraints import Detokenizer, TextEnd
from choreo_agents.models import LoadedModel


@pytest.mark.parametrize("text", [" Ann has 3 red kites.", " Zoë — 你好 🙂!", " a\n b", "no space", " Bob🙂"])
def test_pieces_add_up_to_the_text(tiny: LoadedModel, text: str) -> None:
    detokenizer = Detokenizer(tiny)
    pieces = [detokenizer.add(token) for token in tiny.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_add_nothing(tiny: LoadedModel) -> None:
    detokenizer = Detokenizer(tiny)
    pieces = [detokenizer.add(token) for token in tiny.encode(" Ann<|end|> has")]
    assert pieces == [" Ann", "", " has"]


class WithSpecial:
    """As a loaded model, whose tokenizer drops the space that opens a text, as SentencePiece's do."""

    def __init__(self) -> None:
        vocabulary = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Ann", "▁has", "s"]
        core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=[]))
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
        self.ids = {piece: i for i, piece in enumerate(vocabulary)}

    def decode(self, tokens: list[int], *, special: bool = True) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def bytes_of(self, character: str) -> list[int]:
        return [self.ids[f"<0x{byte:02X}>"] for byte in character.encode()]


def test_a_character_of_several_tokens_comes_with_the_last_of_them() -> None:
    model = WithSpecial()
    detokenizer = Detokenizer(cast(LoadedModel, model))
    pieces = [detokenizer.add(token) for token in [*model.bytes_of("ë"), *model.bytes_of("🙂"), model.ids["s"]]]
    assert pieces == ["", "ë", "", "", "", "🙂", "s"]


def test_spaces_stay_between_words_and_after_special_tokens() -> None:
    model = WithSpecial()
    tokens = [model.ids[piece] for piece in ("▁Ann", "</s>", "▁has", "s", "▁Ann")] + model.bytes_of("é")
    detokenizer = Detokenizer(cast(LoadedModel, model))
    pieces = [detokenizer.add(token) for token in tokens]
    assert "".join(pieces) == model.decode(tokens, special=False) == "Ann hass Anné"
    assert pieces[:3] == ["Ann", "", " has"]


@pytest.mark.parametrize("text", ["vote", "te", "ö vote", "I vöte"])
def test_a_text_ends_with_the_token_that_completes_it(text: str) -> None:
    model = ByteModel(["vot", "ö", " v"], used=3)
    tokens = model.encode(f"I {text}, or {text}") if not text.startswith("I ") else model.encode(f"{text} {text}")
    end = TextEnd(model.loaded(), text)
    told = [end.complete(token) for token in tokens]
    assert told == [model.decode(tokens[: i + 1]).endswith(text) for i in range(len(tokens))]
    assert sum(told) == 2


def test_a_text_does_not_end_within_a_token_or_a_character() -> None:
    """The token that completes it also says more, or starts another character."""
    model = ByteModel(["te!", b"te\xc3"])
    for last in (256, 257):
        end = TextEnd(model.loaded(), "vote")
        assert [end.complete(token) for token in [*model.encode("vo"), last]] == [False] * 3
