"""How far a model sees and what ends its answers, as its small files have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from choreo_agents.models.adapter import listed, max_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from choreo_agents.models.chat import ChatFormat
    from choreo_agents.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class StopToken:
    """A token that ends an answer."""

    text: str
    id: int
    said_by: Sequence[str]
    """The files that name it."""
    closes: bool
    """Whether it is part of what closes a turn; else no message has it."""


@dataclass(frozen=True)
class ModelFacts:
    """What a model's small files tell of it."""

    model_type: str
    context: int
    """Tokens."""
    layers: Mapping[str, int]
    """How many there are, by how far they see."""
    stop_tokens: Sequence[StopToken]
    turn_end: str
    """What closes an answer."""


def facts_of(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> ModelFacts:
    """What the small files of a model tell."""
    text = checkpoint.config.get_text_config()
    return ModelFacts(
        model_type=checkpoint.config.model_type,
        context=max_positions(text),
        layers=_layers(text),
        stop_tokens=_stop_tokens(tokenizer, text, checkpoint.generation(), chat),
        turn_end=chat.turn_end,
    )


def _stop_tokens(
    tokenizer: PreTrainedTokenizerBase, text: PreTrainedConfig, generation: Mapping[str, Any], chat: ChatFormat
) -> list[StopToken]:
    """Those of the generation settings and of the tokenizer; where neither says, of the configuration."""
    told = {
        "generation_config.json": listed(generation.get("eos_token_id")),
        "tokenizer": listed(tokenizer.eos_token_id),
    }
    if not any(told.values()):
        told = {"config.json": listed(getattr(text, "eos_token_id", None))}
    closing = tokenizer.encode(chat.turn_end, add_special_tokens=False)
    numbers = dict.fromkeys(number for numbers in told.values() for number in numbers)
    return [
        StopToken(
            str(tokenizer.convert_ids_to_tokens(number)),
            number,
            [file for file, said in told.items() if number in said],
            closes=number in closing,
        )
        for number in numbers
    ]


def _layers(text: PreTrainedConfig) -> dict[str, int]:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not isinstance(kinds, list) or not kinds:
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * text.num_hidden_layers
    seen = Counter(f"{window} tokens" if kind == "sliding_attention" and window else "all" for kind in kinds)
    return dict(seen)
