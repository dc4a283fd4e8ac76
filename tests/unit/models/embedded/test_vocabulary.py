"""What the weights folder says of the embedded model's words, and who else speaks them."""

from __future__ import annotations

from pathlib import Path

from support.chatty import save_chatty
from support.tiny import save_tiny_llama
from transformers import AutoTokenizer

from choreo_agents.models import LoadedModel, load_model
from choreo_agents.models.embedded import WEIGHTS, vocabulary
from choreo_agents.models.random_llama import LlamaShape, save_random_llama


def test_the_vocabulary_is_what_the_tokenizer_loads() -> None:
    assert vocabulary() == AutoTokenizer.from_pretrained(WEIGHTS).get_vocab()


def test_a_random_model_is_told_things_as_the_embedded_one_is(tmp_path: Path) -> None:
    save_random_llama(LlamaShape(1, 32, 32, 2, 1, 1024), tmp_path / "model", positions=64)
    own, ours = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "model", WEIGHTS))
    said = [{"role": "user", "name": "Ann", "content": "Who has 3 red kites?"}]
    assert own.get_vocab().items() >= ours.get_vocab().items()
    assert own.apply_chat_template(said) == ours.apply_chat_template(said)


def test_all_that_a_random_model_can_say_is_seen(tmp_path: Path) -> None:
    save_random_llama(LlamaShape(1, 32, 32, 2, 1, 1024), tmp_path / "model", positions=64)
    said = AutoTokenizer.from_pretrained(tmp_path / "model")
    words = [said.decode([token]) for token in range(743, 1024)]
    assert len({*words}) == len(words) and all(word.strip().isalpha() for word in words)


def test_who_has_its_words_speaks_its_language(embedded: LoadedModel, tmp_path: Path) -> None:
    assert embedded.has_embedded_vocabulary
    assert load_model(save_tiny_llama(tmp_path / "tiny")).has_embedded_vocabulary
    assert not load_model(save_chatty(tmp_path / "chatty")).has_embedded_vocabulary
