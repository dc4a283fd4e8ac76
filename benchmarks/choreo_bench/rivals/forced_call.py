"""One call of a chat model over a pipeline, of which every token is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from langchain_core.messages import BaseMessage
from torch import Tensor

from choreo_bench.rivals.base import Absent


class ForcedCall:
    """Its own logits processor: it leaves one token in each step, so that every step is paid for all the same.

    Args:
        tokens: The answer.
    """

    prompt: Tensor
    """[1, tokens], as it reached the model."""
    answer: str
    started_s: float
    first_s: float
    """When the first token could be chosen."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._steps = tuple(tokens), 0

    def make(self, chat: Any, messages: list[BaseMessage]) -> str:
        """The words of the answer.

        Raises:
            Absent: The model was stopped before its last token.
        """
        self.started_s = time.perf_counter()
        # A call has to bring all of this: what a `HuggingFacePipeline` was made with, it ignores.
        settings = {
            "do_sample": False,
            "eos_token_id": None,
            "logits_processor": [self],
            "max_new_tokens": len(self._tokens),
            "return_full_text": False,
        }
        answer = chat.invoke(messages, pipeline_kwargs=settings)
        if self._steps != len(self._tokens):
            raise Absent("ChatHuggingFace did not generate what was asked for")
        # The template puts a space before a message's first word, as does that word's token.
        self.answer = str(answer.text).strip()
        return self.answer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._steps == 0:
            self.first_s, self.prompt = time.perf_counter(), input_ids
        only = torch.full_like(scores, -torch.inf)
        only[:, self._tokens[self._steps]] = 0
        self._steps += 1
        return only
