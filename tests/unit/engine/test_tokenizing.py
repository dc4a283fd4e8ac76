"""What a tenant's engine keeps of the texts that it tokenized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from choreo_agents import Engine
from choreo_agents.models import load_model

TEXT = "Bob has 5 blue boats."


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.asked: list[str] = []
        self._tokenizer = tokenizer

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.asked.append(text)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))


def counting_engine() -> tuple[Engine, Counting]:
    loaded = load_model("embedded")
    counting = Counting(loaded.tokenizer)
    return Engine.load(replace(loaded, tokenizer=counting)), counting  # type: ignore[arg-type]


def test_texts_are_tokenized_once_for_each_tenant() -> None:
    engine, counting = counting_engine()
    with engine:
        counting.asked.clear()
        other = engine.tenant("another")
        texts = [TEXT, "Ann has 3 red kites."]
        for prefill in (engine.prefill, engine.prefill, other.prefill, other.prefill):
            said = [prefill(text) for text in texts]
        assert [other.tokens(each) for each in said] == [engine.model.encode(text) for text in texts]
        assert counting.asked[:4] == texts * 2, "the time that a text takes tells nothing of what another tenant said"
        assert len(counting.asked) == 6


def test_long_texts_are_not_kept() -> None:
    engine, counting = counting_engine()
    with engine:
        counting.asked.clear()
        document = f"{TEXT} " * 60
        engine.prefill(document)
        engine.prefill(document)
        assert counting.asked == [document, document]
