"""A tiny random model that is told things at length, as chat models are: it says nonsense, in bytes and short words."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from choreo_agents.workflows.cases import CASES
from support.tiny import save_tiny_llama

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_chatty(folder: Path, layers: int = 1) -> Path:
    """The model on disk. Its tokens are bytes and the commonest pieces of our chat prompts.

    With one layer keys and values are of their own token alone: nothing that was read before changes them.
    """
    prompts = files("choreo_agents.workflows") / "prompts"
    told = [tomllib.loads((prompts / f"{name}.toml").read_text())["chat"] for name in CASES]
    texts = [text for table in told for each in table.values() for text in ([each] if isinstance(each, str) else each)]
    core = Tokenizer(BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*texts, "I vote for Candidate 1. Candidate 2. Candidate 3."], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=TEMPLATE)
    save_tiny_llama(
        folder,
        vocab_size=len(tokenizer),
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(folder)
    return folder
