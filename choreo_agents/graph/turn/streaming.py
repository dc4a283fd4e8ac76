"""Shows a decode to LangChain's callbacks, which feed LangGraph's streams and whatever traces runs."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_async_callback_manager_for_config, merge_configs
from langgraph.config import get_stream_writer

from choreo_agents.chat import Described
from choreo_agents.engine import Engine
from choreo_agents.errors import LineageWarning
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.sync_bridge import to_its_end
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling

_COUNTS = ("tokens_encoded", "tokens_reused", "tokens_recomputed", "tokens_outside_view", "tokens_of_other_models")
"""Of a call's usage, in `stream_mode="custom"`."""
PROVIDER = "choreo"
"""What traces know the engine as."""


class DecodeRun:
    """One decode as a chat-model run: pieces under one message id, which add up to the whole message that ends it.

    Args:
        run: Whose callbacks are told.
    """

    def __init__(self, run: AsyncCallbackManagerForLLMRun) -> None:
        self._run = run
        self._is_over = False

    async def show(self, chunks: Iterable[AIMessageChunk]) -> None:
        """Show pieces of the message; its last one says how it ended."""
        for chunk in chunks:
            is_last = chunk.chunk_position == "last"
            ended = {"finish_reason": chunk.response_metadata["finish_reason"]} if is_last else None
            shown = ChatGenerationChunk(message=chunk, generation_info=ended)
            await self._run.on_llm_new_token(str(chunk.text), chunk=shown)

    async def end(self, message: AIMessage) -> None:
        """Show the whole of it."""
        noted = message.response_metadata
        said = ChatGeneration(message=message, generation_info={"finish_reason": noted["finish_reason"]})
        self._is_over = True
        told = LLMResult(generations=[[said]], llm_output={"model_name": noted["model_name"]})
        _, cancelled = await to_its_end(self._run.on_llm_end(told))
        if cancelled is not None:
            raise cancelled

    async def fail(self, error: BaseException) -> None:
        """Say that it has failed, or was cancelled, unless it has ended."""
        if not self._is_over:
            self._is_over = True
            await to_its_end(self._run.on_llm_error(error))


@asynccontextmanager
async def decode_run(
    config: RunnableConfig,
    name: str,
    model: LoadedModel,
    sampling: Sampling,
    messages: Sequence[BaseMessage],
    tools: Described,
) -> AsyncGenerator[DecodeRun]:
    """A run that is over when the block is left, however it is left.

    Args:
        config: Of whose callbacks, tags and metadata it is.
        name: Of the node that speaks.
        model: Which says it, by this `sampling`.
        messages: What it reads, and the `tools` that it is told of.
    """
    sampling = sampling.with_defaults(model.sampling_defaults)
    usual: dict[str, Any] = {"ls_provider": PROVIDER, "ls_model_name": model.name, "ls_model_type": "chat"}
    usual |= {"ls_temperature": sampling.temperature, "ls_max_tokens": sampling.max_tokens}
    asked = {"model": model.name, **sampling.model_dump(include={"temperature", "top_p", "max_tokens", "seed"})}
    if sampling.stop:
        usual["ls_stop"] = asked["stop"] = list(sampling.stop)
    told = {"tools": [*tools]} if tools else {}
    manager = get_async_callback_manager_for_config(merge_configs(config, {"metadata": usual}))
    # OpenLLMetry takes the model from what the model was made with, whatever the run says.
    announced = manager.on_chat_model_start(
        {"name": PROVIDER, "kwargs": asked},
        [list(messages)],
        name=name,
        invocation_params=asked | {"_type": PROVIDER} | told,
    )
    [run], cancelled = await to_its_end(announced)
    decode = DecodeRun(run)
    try:
        if cancelled is not None:
            raise cancelled
        yield decode
    except BaseException as error:
        await decode.fail(error)
        raise
    assert decode._is_over, "its message is there"


def report(
    engine: Engine, node: str, handle: MessageHandle, words: str, *, started_s: float, first_token_s: float
) -> None:
    """Tell `stream_mode="custom"` what a decode cost.

    Times count from the node's start: what it had to prefill before is part of them.
    """
    usage = engine.usage(handle)
    _tell(
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


def tell_reencoded(node: str, lost: Sequence[tuple[HandleEntry, str]]) -> None:
    """Tell `stream_mode="custom"`, and warn, of messages that had to be encoded again from their words.

    Args:
        node: Whose reading it was.
        lost: What stood for them, and why their encodings are of no use.
    """
    if not lost:
        return
    told = [
        {"message_id": entry["message_id"], "author": entry["author"], "handle": entry["handle"]["id"], "why": why}
        for entry, why in lost
    ]
    _tell({"type": "choreo.reencoded", "agent": node, "messages": told})
    named = "; ".join(f"{each['message_id']!r} of {each['author']!r} ({each['why']})" for each in told)
    caller = sys._getframe(1)
    # Not by `warn`: no two of these are the same, and that would keep the text of each for good.
    warnings.warn_explicit(
        f"{node!r} reads messages that are encoded again from their words here, and are not what others saw: {named}",
        LineageWarning,
        caller.f_code.co_filename,
        caller.f_lineno,
        module=caller.f_globals["__name__"],
    )


def _tell(event: dict[str, Any]) -> None:
    try:
        writer = get_stream_writer()
    except (RuntimeError, KeyError):
        return  # outside a graph, or inside a runnable that hides it, there is no stream
    writer(event)
