"""Escapes control tokens in values that a chat template renders, so that they stay plain text in the prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIGN = "\u241f"
"""Delimiter of placeholders; escaped itself where it occurs in a value."""


class ControlEscaper:
    """An escaper of control tokens for one rendered text.

    Args:
        tokenizer: The tokenizer whose control tokens are escaped.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        controls = sorted(filter(str.strip, tokenizer.added_tokens_encoder), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, [*controls, _SIGN])))
        self._marks: dict[str, str] = {}
        """Placeholders by the text that they replace."""

    def escape(self, value: Any) -> Any:
        """Return a JSON-like value with placeholders for whatever looks like a control token, in keys too."""
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(value) for key, value in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        if not isinstance(value, str):
            return value
        return self._pattern.sub(lambda match: self.mark(match[0]), value)

    def mark(self, words: str) -> str:
        """Return the placeholder of a text."""
        return self._marks.setdefault(words, f"{_SIGN}{len(self._marks)}{_SIGN}")

    def restore(self, text: str) -> PromptText:
        """Return a rendered text with placeholders replaced by plain text; all else is special."""
        return PromptText.filled(text, {mark: words for words, mark in self._marks.items()})
