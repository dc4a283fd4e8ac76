"""The scripted model's tokens: any text comes back, and most words are one token or two."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.testing.model import SPECIAL_TOKENS, ScriptedTokenizer

TOKENIZER = ScriptedTokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_any_text_comes_back(text: str) -> None:
    tokens = [*TOKENIZER.spell(text)]
    assert TOKENIZER.decode(tokens) == TOKENIZER.decode(tokens, skip_special_tokens=True) == text
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.one_of(TEXTS, st.sampled_from(SPECIAL_TOKENS))))
def test_special_tokens_have_no_text_of_their_own(parts: list[str]) -> None:
    tokens = TOKENIZER.encode("".join(parts))
    plain = [token for token in tokens if token >= len(SPECIAL_TOKENS)]
    assert TOKENIZER.decode(tokens) == "".join(parts)
    assert TOKENIZER.decode(tokens, skip_special_tokens=True) == TOKENIZER.decode(plain)


@given(TEXTS)
def test_numbers_are_in_range_and_stay_exact_in_json(text: str) -> None:
    for token in TOKENIZER.encode(text):
        assert 0 <= token < TOKENIZER.size <= 2**53 and int(float(token)) == token
        assert json.loads(json.dumps(token)) == token


@pytest.mark.parametrize(
    ("text", "most"), [(" Bob has 5 blue boats.", 6), (" The quick brown fox jumps over the lazy dog.", 10)]
)
def test_text_takes_no_more_tokens_than_with_a_trained_tokenizer(text: str, most: int) -> None:
    assert len(TOKENIZER.encode(text)) <= most


def test_words_that_look_like_special_tokens_are_words() -> None:
    assert min(TOKENIZER.spell("a <|end|> is written")) >= len(SPECIAL_TOKENS)
    assert TOKENIZER.end_token_id in TOKENIZER.encode("a <|end|> is written")
