"""Formats a model's answers as OpenAI's chat completions and stream events."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, convert_to_openai_messages
from langchain_core.messages.ai import UsageMetadata

from choreo_agents.chat import ChatCall
from choreo_server.handles import seal_handle


def completion(calls: Sequence[ChatCall], number: str, model: str, *, one_call: bool) -> dict[str, Any]:
    """Return the body of a completion.

    Args:
        calls: Finished calls.
        number: Id of the request.
        model: Name of the model for clients.
        one_call: Whether only the first of several tool calls is returned.
    """
    choices = [_choice(place, call, one_call=one_call) for place, call in enumerate(calls)]
    head = {"id": number, "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**head, "choices": choices, "usage": usage_of(calls), "choreo": choices[0]["choreo"]}


def _choice(place: int, call: ChatCall, *, one_call: bool) -> dict[str, Any]:
    message = _message(call)
    body: dict[str, Any] = {"role": "assistant", "content": f"{message.text}{_invalid_calls(message)}"}
    if thoughts := _thoughts(message):
        body["reasoning_content"] = thoughts
    if message.tool_calls:
        [as_openai] = convert_to_openai_messages([message])
        body["tool_calls"] = as_openai["tool_calls"][: 1 if one_call else None]
        body["content"] = body["content"] or None
    return {"index": place, "message": body, **_finish(call)}


def _invalid_calls(message: AIMessage) -> str:
    """Return invalid tool calls as text to append to the answer, since the protocol has no field for them."""
    return "".join(f"\n{call['args']}" for call in message.invalid_tool_calls)[0 if message.text else 1 :]


def _finish(call: ChatCall) -> dict[str, Any]:
    """Return the last fields of a choice, or of its last event."""
    noted, handle = _message(call).response_metadata, call.handle
    assert handle is not None
    choreo = {"handle": seal_handle(call.engine, handle)}
    return {"logprobs": noted.get("logprobs"), "finish_reason": noted["finish_reason"], "choreo": choreo}


def _message(call: ChatCall) -> AIMessage:
    assert call.message is not None, "it was heard to its end"
    return call.message


def _thoughts(message: AIMessage | AIMessageChunk) -> str:
    blocks = message.content if isinstance(message.content, list) else ()
    return "".join(str(block["reasoning"]) for block in blocks if isinstance(block, dict) and "reasoning" in block)


def usage_of(calls: Sequence[ChatCall]) -> dict[str, Any]:
    """Return the usage of a request, whose prompt counts once however many answers it has."""
    usages: list[UsageMetadata] = [used for call in calls if (used := _message(call).usage_metadata) is not None]
    read, written = usages[0]["input_tokens"], sum(usage["output_tokens"] for usage in usages)
    cached = min(usage.get("input_token_details", {}).get("cache_read", 0) for usage in usages)
    thought = sum(usage.get("output_token_details", {}).get("reasoning", 0) for usage in usages)
    counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    details = {"completion_tokens_details": {"reasoning_tokens": thought}}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}, **details}


class Pieces:
    """Formatter of stream events, with as few bytes and as little work for each token as possible.

    Args:
        number: Id of the request.
        model: Name of the model for clients.
        one_call: Whether only the first of several tool calls is returned.
    """

    def __init__(self, number: str, model: str, *, one_call: bool) -> None:
        head = {"id": number, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._head, self._one_call = f"data: {json.dumps(head)[:-1]}, ", one_call

    def first(self, place: int) -> bytes:
        """Return the first event of an answer, which has its role."""
        return self._choice(place, {"role": "assistant", "content": ""})

    def delta(self, place: int, chunk: AIMessageChunk) -> bytes:
        """Return the event of a chunk; empty if the chunk has nothing for the client."""
        delta: dict[str, Any] = {}
        if isinstance(chunk.content, str):
            if chunk.content:
                delta["content"] = chunk.content
        else:
            delta |= {"content": text} if (text := str(chunk.text)) else {}
            delta |= {"reasoning_content": thoughts} if (thoughts := _thoughts(chunk)) else {}
        if chunk.tool_call_chunks:
            can_be_made = [piece for piece in chunk.tool_call_chunks if piece["index"] is not None]
            calls = [_call(piece) for piece in can_be_made if not (self._one_call and piece["index"])]
            delta |= {"tool_calls": calls} if calls else {}
        return self._choice(place, delta) if delta else b""

    def last(self, place: int, call: ChatCall) -> bytes:
        """Return the last event of an answer, which has its finish reason and handle."""
        ending, broken = _finish(call), _invalid_calls(_message(call))
        choice = {"index": place, "delta": {"content": broken} if broken else {}, **ending}
        return self._event({"choices": [choice], "choreo": ending["choreo"]})

    def usage(self, calls: Sequence[ChatCall]) -> bytes:
        """Return the event with the request's usage."""
        return self._event({"choices": [], "usage": usage_of(calls)})

    def _choice(self, place: int, delta: dict[str, Any]) -> bytes:
        return (
            f'{self._head}"choices": [{{"index": {place}, "delta": {json.dumps(delta)}, "logprobs": null, '
            f'"finish_reason": null}}]}}\n\n'
        ).encode()

    def _event(self, more: dict[str, Any]) -> bytes:
        return f"{self._head}{json.dumps(more)[1:]}\n\n".encode()


def _call(piece: Any) -> dict[str, Any]:
    """Return a complete tool call."""
    function = {"name": piece["name"], "arguments": piece["args"]}
    return {"index": piece["index"], "function": function, "id": piece["id"], "type": "function"}
