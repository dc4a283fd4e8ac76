"""The embedded language's tokenizer, by example."""

import pytest
from choreo_bench.embedded.tokenizer import build_tokenizer
from choreo_bench.language import vocabulary
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from choreo_agents.models.embedded import WEIGHTS


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids]


def test_every_word_of_the_vocabulary_after_a_space_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    words = vocabulary.words()
    assert pieces(tokenizer, "".join(f" {word}" for word in words)) == [f" {word}" for word in words]
    assert len(set(words)) == len(words)


def test_punctuation_is_one_token_without_a_space(tokenizer: PreTrainedTokenizerFast) -> None:
    assert pieces(tokenizer, " Ann has 3 red kites.") == [" Ann", " has", " 3", " red", " kites", "."]
    assert all(pieces(tokenizer, mark) == [mark] for mark in vocabulary.PUNCTUATION)


def test_numbers_up_to_99_are_one_token_and_longer_ones_are_spelt(tokenizer: PreTrainedTokenizerFast) -> None:
    assert pieces(tokenizer, " 12 kites, 99 boats") == [" 12", " kites", ",", " 99", " boats"]
    assert pieces(tokenizer, " 123 kites") == [" ", "1", "2", "3", " kites"]


def test_special_tokens_are_one_token_each_with_ids_that_the_model_expects(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(vocabulary.SPECIAL_TOKENS)
    assert tokenizer.encode(text, add_special_tokens=False) == list(range(len(vocabulary.SPECIAL_TOKENS)))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_no_token_is_added_on_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("") == [] and len(tokenizer.encode(" red")) == 1


def test_the_shipped_tokenizer_is_the_one_that_is_built(tokenizer: PreTrainedTokenizerFast) -> None:
    shipped = AutoTokenizer.from_pretrained(WEIGHTS)
    assert shipped.get_vocab() == tokenizer.get_vocab()
    assert shipped.chat_template == tokenizer.chat_template
    text = "<|user|> Ann: What does Zoë have?<|end|>"
    assert shipped.encode(text) == tokenizer.encode(text)
