"""Shows a decode to LangChain's callbacks, which feed LangGraph's `stream_mode="messages"`."""

from __future__ import annotations

import time
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_async_callback_manager_for_config
from langgraph.config import get_stream_writer

from choreo_agents.engine import Engine
from choreo_agents.kv.handle import MessageHandle

_COUNTS = ("tokens_encoded", "tokens_reused", "tokens_recomputed", "tokens_beyond", "tokens_of_other_models")
"""Of a call's usage, in `stream_mode="custom"`."""


class DecodeRun:
    """One decode as a chat-model run: tokens under one message id, then the whole message."""

    def __init__(self, run: AsyncCallbackManagerForLLMRun, message_id: str, name: str) -> None:
        self._run = run
        self._message_id = message_id
        self._name = name
        self._thinks = False

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
        await self._show(text, [{"type": "text", "text": text, "index": 1}] if self._thinks else text)

    async def thought(self, text: str) -> None:
        """Show a piece of what is thought before: as reasoning, and as no text."""
        self._thinks = True
        await self._show("", [{"type": "reasoning", "reasoning": text, "index": 0}])

    async def call(self, piece: ToolCallChunk) -> None:
        """Show a piece of a call."""
        chunk = AIMessageChunk(content="", tool_call_chunks=[piece], id=self._message_id, name=self._name)
        await self._run.on_llm_new_token("", chunk=ChatGenerationChunk(message=chunk))

    async def _show(self, token: str, content: Any) -> None:
        chunk = AIMessageChunk(content=content, id=self._message_id, name=self._name)
        await self._run.on_llm_new_token(token, chunk=ChatGenerationChunk(message=chunk))

    async def end(self, message: AIMessage) -> None:
        await self._run.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message)]]))

    async def fail(self, error: BaseException) -> None:
        await self._run.on_llm_error(error)


def report(
    engine: Engine, node: str, handle: MessageHandle, words: str, *, started_s: float, first_token_s: float
) -> None:
    """Tell `stream_mode="custom"` what a decode cost.

    Times count from the node's start: what it had to prefill before is part of them.
    """
    try:
        writer = get_stream_writer()
    except (RuntimeError, KeyError):
        return  # outside a graph, or inside a runnable that hides it, there is no stream
    usage = engine.usage(handle)
    writer(
        {
            "type": "choreo.decode",
            "agent": node,
            "handle": handle.id,
            "words": words,
            **{count: getattr(usage, count) for count in _COUNTS},
            "ttft_s": first_token_s - started_s,
            "duration_s": time.perf_counter() - started_s,
        }
    )
