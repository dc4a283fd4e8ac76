"""Reports of a decode to LangChain's callbacks, which feed LangGraph's streams and tracers."""

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
from choreo_agents.graph.sync_bridge import run_to_end
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling

_COUNTS = ("tokens_encoded", "tokens_reused", "tokens_recomputed", "tokens_outside_view", "tokens_of_other_models")
"""Fields of a call's usage that `stream_mode="custom"` reports."""
PROVIDER = "choreo"
"""Provider name of the engine in traces."""


class DecodeRun:
    """A decode as a LangChain chat-model run: chunks under one message id that add up to its final message.

    Args:
        run: Callback manager of the run.
    """

    def __init__(self, run: AsyncCallbackManagerForLLMRun) -> None:
        self._run = run
        self.is_over = False
        self.is_watched = bool(run.handlers)
        """True if any callback listens, such as a stream of messages; else no token has to cross to this thread."""

    async def show(self, chunks: Iterable[AIMessageChunk]) -> None:
        """Report chunks of the message; the last one has the finish reason."""
        for chunk in chunks:
            is_last = chunk.chunk_position == "last"
            info = {"finish_reason": chunk.response_metadata["finish_reason"]} if is_last else None
            generation = ChatGenerationChunk(message=chunk, generation_info=info)
            await self._run.on_llm_new_token(str(chunk.text), chunk=generation)

    async def end(self, message: AIMessage) -> None:
        """Report the complete message."""
        metadata = message.response_metadata
        generation = ChatGeneration(message=message, generation_info={"finish_reason": metadata["finish_reason"]})
        self.is_over = True
        result = LLMResult(generations=[[generation]], llm_output={"model_name": metadata["model_name"]})
        _, cancelled = await run_to_end(self._run.on_llm_end(result))
        if cancelled is not None:
            raise cancelled


@asynccontextmanager
async def decode_run(
    config: RunnableConfig,
    name: str,
    model: LoadedModel,
    sampling: Sampling,
    messages: Sequence[BaseMessage],
    tools: Described,
) -> AsyncGenerator[DecodeRun]:
    """Open a chat-model run that is over when the block is left, however it is left.

    Args:
        config: Config with the callbacks, tags and metadata of the run.
        name: Name of the node.
        model: Model that decodes, with this `sampling`.
        messages: Messages of the view; `tools` are the descriptions of its tools.
    """
    sampling = sampling.with_defaults(model.sampling_defaults)
    metadata: dict[str, Any] = {"ls_provider": PROVIDER, "ls_model_name": model.name, "ls_model_type": "chat"}
    metadata |= {"ls_temperature": sampling.temperature, "ls_max_tokens": sampling.max_tokens}
    parameters = {"model": model.name, **sampling.model_dump(include={"temperature", "top_p", "max_tokens", "seed"})}
    if sampling.stop:
        metadata["ls_stop"] = parameters["stop"] = list(sampling.stop)
    tool_parameters = {"tools": [*tools]} if tools else {}
    manager = get_async_callback_manager_for_config(merge_configs(config, {"metadata": metadata}))
    # OpenLLMetry reads the model's name from the constructor kwargs, not from invocation_params.
    serialized, invoked = {"name": PROVIDER, "kwargs": parameters}, parameters | {"_type": PROVIDER} | tool_parameters
    start = manager.on_chat_model_start(serialized, [list(messages)], name=name, invocation_params=invoked)
    [run], cancelled = await run_to_end(start)
    decode = DecodeRun(run)
    try:
        if cancelled is not None:
            raise cancelled
        yield decode
    except BaseException as error:
        if not decode.is_over:
            await run_to_end(run.on_llm_error(error))
        raise
    assert decode.is_over, "its message is there"


def report_decode(
    engine: Engine, node: str, handle: MessageHandle, text: str, *, started_s: float, first_token_s: float
) -> None:
    """Report the usage of a decode to `stream_mode="custom"`.

    Times, in seconds, count from the node's start: its prefills are included.
    """
    usage = engine.usage(handle)
    counts = {count: getattr(usage, count) for count in _COUNTS}
    times = {"ttft_s": first_token_s - started_s, "duration_s": time.perf_counter() - started_s}
    _write_event({"type": "choreo.decode", "agent": node, "handle": handle.id, "words": text, **counts, **times})


def report_reencoded(node: str, lost: Sequence[tuple[HandleEntry, str]]) -> None:
    """Report to `stream_mode="custom"`, and warn of, messages that were encoded again from their text.

    Args:
        node: Node that reads them.
        lost: Their entries, and why the recorded handles cannot be used.
    """
    if not lost:
        return
    messages = [
        {"message_id": entry["message_id"], "author": entry["author"], "handle": entry["handle"]["id"], "why": why}
        for entry, why in lost
    ]
    _write_event({"type": "choreo.reencoded", "agent": node, "messages": messages})
    named = "; ".join(f"{message['message_id']!r} of {message['author']!r} ({message['why']})" for message in messages)
    caller = sys._getframe(1)
    # Not `warnings.warn`: its registry keeps every text for good, and no two of these are the same.
    warnings.warn_explicit(
        f"{node!r} reads messages that are encoded again from their text, and differ from what others saw: {named}",
        LineageWarning,
        caller.f_code.co_filename,
        caller.f_lineno,
        module=caller.f_globals["__name__"],
    )


def _write_event(event: dict[str, Any]) -> None:
    try:
        writer = get_stream_writer()
    except (RuntimeError, KeyError):
        return  # outside a graph, or inside a runnable that hides it, there is no stream
    writer(event)
