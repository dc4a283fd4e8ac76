"""The embedded model: a tiny Llama trained on a synthetic language, shipped inside the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""The folder that `from_pretrained` reads: config, weights, tokenizer, chat template, card."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files that another model needs to use the same tokenizer and chat template."""


@lru_cache(maxsize=1)
def vocabulary() -> Mapping[str, int]:
    """Read ids by token from the tokenizer's file, without building a tokenizer."""
    written = json.loads((WEIGHTS / TOKENIZER_FILES[0]).read_text())
    return {**written["model"]["vocab"], **{added["content"]: added["id"] for added in written["added_tokens"]}}
