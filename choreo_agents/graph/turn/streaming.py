"""Shows a decode to LangChain's callbacks, which feed LangGraph's `stream_mode="messages"`."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_async_callback_manager_for_config


class DecodeRun:
    """One decode as a chat-model run: tokens under one message id, then the whole message."""

    def __init__(self, run: AsyncCallbackManagerForLLMRun, message_id: str, name: str) -> None:
        self._run = run
        self._message_id = message_id
        self._name = name

    @classmethod
    async def start(
        cls, config: RunnableConfig, model: str, seen: list[BaseMessage], message_id: str, name: str
    ) -> DecodeRun:
        """Announce a decode over the messages `seen`."""
        manager = get_async_callback_manager_for_config(config)
        serialized: dict[str, Any] = {"name": "choreo"}
        [run] = await manager.on_chat_model_start(serialized, [seen], invocation_params={"model": model})
        return cls(run, message_id, name)

    async def token(self, text: str) -> None:
        """Show a piece of the message's text."""
        chunk = AIMessageChunk(content=text, id=self._message_id, name=self._name)
        await self._run.on_llm_new_token(text, chunk=ChatGenerationChunk(message=chunk))

    async def end(self, message: AIMessage) -> None:
        await self._run.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message)]]))

    async def fail(self, error: BaseException) -> None:
        await self._run.on_llm_error(error)
