"""A `ChatHuggingFace` whose calls say one after the other what they are given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from langchain_core.messages import AIMessage, BaseMessage

from choreo_bench.rivals.base import absent_on_failure
from choreo_bench.rivals.chat_hugging_face import chat_over, quietly
from choreo_bench.rivals.forced_call import ForcedCall


class ForcedChatHuggingFace:
    """For programs that call their model in a known order.

    Args:
        path: Of the checkpoint.
        dtype: Of its weights.
        device: Where it runs.

    Raises:
        Absent: It is not installed, or cannot serve it.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: str = "cpu") -> None:
        self._chat = chat_over(path, dtype, device)
        self.say(())

    def say(self, said: Sequence[Sequence[int]]) -> None:
        """What the calls from now on say: the tokens of each."""
        self._calls = [ForcedCall(tokens) for tokens in said]
        self._made: list[ForcedCall] = []
        self.ttft_s: list[float] = []
        """Of each call."""

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Of each call, as it reached the model."""
        return [tuple(call.prompt[0].tolist()) for call in self._made]

    def invoke(self, messages: Sequence[BaseMessage]) -> AIMessage:
        """The next answer.

        Raises:
            Absent: It was not given in full.
        """
        started, call = time.perf_counter(), self._calls.pop(0)
        with absent_on_failure("ChatHuggingFace"), quietly():
            words = call.make(self._chat, list(messages))
        self.ttft_s.append(call.first_s - started)
        self._made.append(call)
        return AIMessage(words)
