"""Builds the embedded model's tokenizer: whole words as single tokens, bytes for everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from choreo_bench.language import vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['name'] %} {{ message['name'] }}:{% endif %} {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""One self-contained span per message: `<|role|> Name: words<|end|>`."""

_PIECES = Regex(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]|\s")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the embedded language.

    A word of the vocabulary after a space is one token (the chat template puts a space before every message's
    first word); the 256 byte tokens spell anything else, so that every Unicode string encodes and decodes back.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes seconds, and only models need it

    tokens = [
        *vocabulary.SPECIAL_TOKENS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(f"Ġ{word}" for word in vocabulary.words()),
    ]
    # `ignore_merges`: a piece that is in the vocabulary is taken whole; with no merges all others become bytes.
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in vocabulary.SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=vocabulary.BOS,
        eos_token=vocabulary.END,
        pad_token=vocabulary.PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
