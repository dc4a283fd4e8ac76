"""What the package ships for its embedded model."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from choreo_agents.models.embedded import WEIGHTS


def shipped_tokenizer() -> PreTrainedTokenizerFast:
    """Load the embedded model's tokenizer, anew for each caller, who may change it."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(WEIGHTS)
    return tokenizer
