"""What a loaded model keeps of the texts that it tokenized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from choreo_agents.models import load_model


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.asked: list[str] = []
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.asked.append(text)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))


def test_a_text_is_tokenized_once_and_what_is_given_out_is_the_callers() -> None:
    loaded = load_model("embedded")
    counting = Counting(loaded.tokenizer)
    model = replace(loaded, tokenizer=counting)  # type: ignore[arg-type]
    first = model.encode("Bob has 5 blue boats.")
    first.append(0)
    assert model.encode("Bob has 5 blue boats.") == first[:-1] == loaded.encode("Bob has 5 blue boats.")
    assert counting.asked == ["Bob has 5 blue boats."]


def test_long_texts_are_not_kept() -> None:
    loaded = load_model("embedded")
    counting = Counting(loaded.tokenizer)
    model = replace(loaded, tokenizer=counting)  # type: ignore[arg-type]
    document = "Bob has 5 blue boats. " * 200
    assert model.encode(document) == model.encode(document)
    assert counting.asked == [document, document]


@pytest.mark.parametrize("content", [7, None, [1, 2]])
def test_what_is_no_text_is_an_error_of_type(content: Any) -> None:
    with pytest.raises(TypeError):
        load_model("embedded").encode(content)
