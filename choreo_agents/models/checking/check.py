"""Checks a model by its small files: whether it can be served, what its prompts are, and what memory it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from choreo_agents.models.adapter import end_tokens, max_positions
from choreo_agents.models.chat.template import Template
from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.checking.comparing import ViewComparison, compare_view
from choreo_agents.models.checking.needs import DtypeChoice, MemoryNeeds, StoredWeights, dtype_of, needs_of
from choreo_agents.models.checking.talk import views
from choreo_agents.models.loader import AUTO, open_checkpoint
from choreo_agents.models.safe_tokenization import safe_tokenizer
from choreo_agents.models.weights.dtypes import dtype_named

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from choreo_agents.models.chat.format import ChatFormat


@dataclass(frozen=True)
class StopToken:
    """A token that ends an answer."""

    text: str
    id: int
    said_by: Sequence[str]
    """The files that define it."""
    closes: bool
    """Whether it is part of the text that closes a turn; if not, it is in no message."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model from its small files."""

    model_type: str
    context: int
    """Context length in tokens."""
    layers: Mapping[str, int]
    """Number of layers by attention window: "all" or "N tokens"."""
    stop_tokens: Sequence[StopToken]
    turn_end: str
    """Text that closes an answer."""


@dataclass(frozen=True)
class ModelCheck:
    """The result of a check of a model that can be served."""

    name: str
    device: torch.device
    facts: ModelFacts
    dtype: DtypeChoice
    memory: MemoryNeeds
    has_template: bool
    shared: Sequence[ViewComparison]
    """Views over shared edges, compared with the template's rendering."""
    reencoded: Sequence[ViewComparison]
    """Views over edges that encode text again."""

    def as_object(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        memory, dtype = self.memory, self.dtype
        return {
            "model": self.name,
            "served": memory.holds_weights,
            "device": str(self.device),
            "dtype": {
                "checkpoint": str(dtype.own).removeprefix("torch."),
                "served": str(dtype.served).removeprefix("torch."),
                "why": dtype.why,
                "quantised": dtype.quantised,
            },
            "memory": {
                "weights_bytes": memory.weights,
                "weights_measured": memory.measured,
                "kv_bytes_per_token": memory.kv_per_token,
                "kv_bytes_of_context": memory.kv_of_context,
                "free_bytes": memory.free,
                "holds_weights": memory.holds_weights,
                "holds_context": memory.holds_context,
            },
            **asdict(self.facts),
            "has_template": self.has_template,
            "views": [view.as_object() for view in (*self.shared, *self.reencoded)],
        }


def check_model(
    name: str | Path,
    *,
    device: str | torch.device = AUTO,
    dtype: torch.dtype | str | None = None,
    chat: Mapping[str, Any] | None = None,
) -> ModelCheck:
    """Check a model without reading its weights.

    Args:
        name: `"embedded"`, a folder in Hugging Face's layout, or a hub name.
        device: Where the model is to run; `"auto"`: the GPU if there is one.
        dtype: Dtype of weights and KV; None: the default.
        chat: Variables of its chat template, and `date`: see `load_model`.

    Raises:
        UnsupportedModelError: Its small files show that it cannot be served; says why.
        ModelNotFoundError: There is no such model. InvalidRequestError: An option cannot be one.
        OSError: Its files are damaged.
    """
    dtype = dtype_named(dtype)
    checkpoint, where = open_checkpoint(name, device, dtype, weights=False)
    tokenizer = checkpoint.tokenizer()
    template = Template(tokenizer, chat)
    turns = chat_format(tokenizer, chat)
    stored = StoredWeights.read(checkpoint.folder())
    choice = dtype_of(checkpoint.config, stored, where, dtype)
    text = checkpoint.config.get_text_config()
    ends = _stop_tokens(tokenizer, text, checkpoint.generation(), turns)
    beside = partial(compare_view, turns, template, safe_tokenizer(tokenizer))
    return ModelCheck(
        str(name),
        where,
        ModelFacts(checkpoint.config.model_type, max_positions(text), _layers(text), ends, turns.turn_end),
        choice,
        needs_of(checkpoint, stored, choice.served, where),
        tokenizer.chat_template is not None,
        [beside(view) for view in views()],
        [beside(view) for view in views(encodes_again=True)],
    )


def _stop_tokens(
    tokenizer: PreTrainedTokenizerBase, text: PreTrainedConfig, generation: Mapping[str, Any], chat: ChatFormat
) -> list[StopToken]:
    ends = end_tokens(generation.get("eos_token_id"), tokenizer.eos_token_id, getattr(text, "eos_token_id", None))
    closing = tokenizer.encode(chat.turn_end, add_special_tokens=False)
    return [
        StopToken(str(tokenizer.convert_ids_to_tokens(number)), number, files, closes=number in closing)
        for number, files in ends.items()
    ]


def _layers(text: PreTrainedConfig) -> dict[str, int]:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not isinstance(kinds, list) or not kinds:
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * text.num_hidden_layers
    counts = Counter(f"{window} tokens" if kind == "sliding_attention" and window else "all" for kind in kinds)
    return dict(counts)
