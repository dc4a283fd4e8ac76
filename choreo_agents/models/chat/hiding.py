"""Keeps words words where a template writes them: what looks like a control token is a mark until it is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIGN = "\u241f"
"""Marks are made of it: whoever says it is not taken for one."""


class Hiding:
    """Of one text.

    Args:
        tokenizer: Whose control tokens are hidden.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        controls = sorted(filter(str.strip, tokenizer.added_tokens_encoder), key=len, reverse=True)
        self._hidden = re.compile("|".join(map(re.escape, [*controls, _SIGN])))
        self._marks: dict[str, str] = {}
        """By the words that they stand for."""

    def hidden(self, told: Any) -> Any:
        """What is told, in which marks stand for what looks like a control token; keys of objects, too."""
        if isinstance(told, Mapping):
            return {self.hidden(key): self.hidden(value) for key, value in told.items()}
        if isinstance(told, list | tuple):
            return [self.hidden(each) for each in told]
        if not isinstance(told, str):
            return told
        return self._hidden.sub(lambda found: self.mark(found[0]), told)

    def mark(self, words: str) -> str:
        """What stands for these words until they are shown."""
        return self._marks.setdefault(words, f"{_SIGN}{len(self._marks)}{_SIGN}")

    def shown(self, text: str) -> PromptText:
        """A text in which words stand for marks, and all else is frame."""
        return PromptText.filled(text, {mark: words for words, mark in self._marks.items()})
