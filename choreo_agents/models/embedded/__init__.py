"""The embedded model: a tiny Llama trained on a synthetic language, shipped inside the package."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""The folder that `from_pretrained` reads: config, weights, tokenizer, chat template, card."""
