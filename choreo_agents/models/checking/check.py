"""Checks a model by its small files: whether it can be served, how it is fed, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from choreo_agents.models.chat import chat_format
from choreo_agents.models.chat.template import Template
from choreo_agents.models.checking.comparing import ViewComparison, compared
from choreo_agents.models.checking.facts import ModelFacts, facts_of
from choreo_agents.models.checking.needs import DtypeChoice, MemoryNeeds, StoredWeights, dtype_of, needs_of
from choreo_agents.models.checking.talk import views
from choreo_agents.models.loader import AUTO, opened
from choreo_agents.models.spelling import spelling_of
from choreo_agents.models.weights.dtypes import dtype_named

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelCheck:
    """What can be told of a model that can be served."""

    name: str
    device: torch.device
    facts: ModelFacts
    dtype: DtypeChoice
    memory: MemoryNeeds
    has_template: bool
    shared: Sequence[ViewComparison]
    """What agents read over shared edges, beside the template's own."""
    reencoded: Sequence[ViewComparison]
    """What they read over edges that encode words again."""

    def as_object(self) -> dict[str, Any]:
        """JSON-plain."""
        memory, dtype = self.memory, self.dtype
        return {
            "model": self.name,
            "served": True,
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
    """Tell all that can be told of a model without its weights.

    Args:
        name: `"embedded"`, a folder in Hugging Face's layout, or a hub name.
        device: Where the model is to run; `"auto"`: the GPU if there is one.
        dtype: Of weights and KV; None: what they would have by default.
        chat: Variables of its chat template, and `date`: see `load_model`.

    Raises:
        UnsupportedModelError: It cannot be served, as far as these files tell: says why.
        ModelNotFoundError: There is no such model. InvalidRequestError: An option cannot be one.
        OSError: Its files are damaged.
    """
    dtype = dtype_named(dtype)
    checkpoint, where = opened(name, device, dtype, weights=False)
    tokenizer = checkpoint.tokenizer()
    template = Template(tokenizer, chat)
    turns = chat_format(tokenizer, chat)
    stored = StoredWeights.read(checkpoint.folder())
    choice = dtype_of(checkpoint.config, stored, where, dtype)
    beside = partial(compared, turns, template, spelling_of(tokenizer))
    return ModelCheck(
        str(name),
        where,
        facts_of(checkpoint, tokenizer, turns),
        choice,
        needs_of(checkpoint, stored, choice.served, where),
        tokenizer.chat_template is not None,
        [beside(view) for view in views()],
        [beside(view) for view in views(encodes_again=True)],
    )
