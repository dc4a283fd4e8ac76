"""Merging what was answered: from its KV, in the call of any chat model."""

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
        """Answer about several answers of the same engine and tenant, reading their KV and not their words.

        `invoke`, `stream` and the like do the same where they are given `merges=answers`: behind instructions that
        the prompt starts with, before the rest of it. What has no encoding here is read in its words, with a
        `LineageWarning`.

        Args:
            answers: In the order in which they are read.
            prompt: What is asked of them, and instructions before it.
            config: As for `invoke`, as are `kwargs`.
            kwargs: What the call says otherwise.
        """
        return self.invoke(prompt, config, merges=answers, **kwargs)

    async def amerge(
        self,
        answers: Sequence[BaseMessage],
        prompt: LanguageModelInput,
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """See `merge`."""
        return await self.ainvoke(prompt, config, merges=answers, **kwargs)


class ChatBinding(Merging, RunnableBinding[LanguageModelInput, AIMessage]):  # type: ignore[no-redef]
    """A chat model with arguments of its calls, its tools among them."""

    @classmethod
    def lc_id(cls) -> list[str]:
        return RunnableBinding.lc_id()
