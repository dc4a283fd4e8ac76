"""Base class of chat models that merge answers from their KV instead of their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBinding


class Merging(Runnable[LanguageModelInput, AIMessage]):
    """A chat model that merges answers."""

    def merge(
        self,
        answers: Sequence[BaseMessage],
        prompt: LanguageModelInput,
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer a prompt about earlier answers of the same engine and tenant, reading their KV instead of their text.

        `invoke`, `stream` and the like do the same with `merges=answers`. Answers are read after the system messages at
        the start of the prompt, and before its other messages. An answer without KV on this engine is encoded from its
        text, with a `LineageWarning`.

        Args:
            answers: The answers, in the order in which they are read.
            prompt: System messages, if any, and the question.
            config: As for `invoke`.
            kwargs: Arguments of the call, as for `invoke`.
        """
        return self.invoke(prompt, config, merges=answers, **kwargs)

    async def amerge(
        self,
        answers: Sequence[BaseMessage],
        prompt: LanguageModelInput,
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Merge answers asynchronously; see `merge`."""
        return await self.ainvoke(prompt, config, merges=answers, **kwargs)


class ChatBinding(Merging, RunnableBinding[LanguageModelInput, AIMessage]):  # type: ignore[no-redef]
    """A chat model with bound arguments, such as tools, which can still merge answers."""

    @classmethod
    def lc_id(cls) -> list[str]:
        return RunnableBinding.lc_id()
