"""What a model says, in OpenAI's words."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, convert_to_openai_messages
from langchain_core.messages.ai import UsageMetadata

from choreo_agents.chat import ChatCall
from choreo_server.handles import sealed


def completion(calls: Sequence[ChatCall], number: str, model: str, *, one_call: bool) -> dict[str, Any]:
    """The whole answer to a request.

    Args:
        calls: That were heard to their end.
        number: Of the request.
        model: As the server calls it.
        one_call: Whether only the first of several calls of tools is told.
    """
    choices = [_choice(place, call, one_call=one_call) for place, call in enumerate(calls)]
    return {
        "id": number,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_of(calls),
        "choreo": choices[0]["choreo"],
    }


def _choice(place: int, call: ChatCall, *, one_call: bool) -> dict[str, Any]:
    message = _said(call)
    told: dict[str, Any] = {"role": "assistant", "content": f"{message.text}{_broken(message)}"}
    if thoughts := _thoughts(message):
        told["reasoning_content"] = thoughts
    if message.tool_calls:
        [as_openai] = convert_to_openai_messages([message])
        told["tool_calls"] = as_openai["tool_calls"][: 1 if one_call else None]
        told["content"] = told["content"] or None
    return {"index": place, "message": told, **_ending(call)}


def _broken(message: AIMessage) -> str:
    """What was to be a call and is none, behind what else is said: the protocol has no other place for it."""
    return "".join(f"\n{each['args']}" for each in message.invalid_tool_calls)[0 if message.text else 1 :]


def _ending(call: ChatCall) -> dict[str, Any]:
    """Of a choice, or of the last piece of one."""
    noted, handle = _said(call).response_metadata, call.handle
    assert handle is not None
    return {
        "logprobs": noted.get("logprobs"),
        "finish_reason": noted["finish_reason"],
        "choreo": {"handle": sealed(call.engine, handle)},
    }


def _said(call: ChatCall) -> AIMessage:
    assert call.message is not None, "it was heard to its end"
    return call.message


def _thoughts(message: AIMessage | AIMessageChunk) -> str:
    blocks = message.content if isinstance(message.content, list) else ()
    return "".join(str(each["reasoning"]) for each in blocks if isinstance(each, dict) and "reasoning" in each)


def usage_of(calls: Sequence[ChatCall]) -> dict[str, Any]:
    """What a request cost: its prompt is read once, however many answer."""
    each: list[UsageMetadata] = [used for call in calls if (used := _said(call).usage_metadata) is not None]
    read, said = each[0]["input_tokens"], sum(one["output_tokens"] for one in each)
    cached = min(one.get("input_token_details", {}).get("cache_read", 0) for one in each)
    thought = sum(one.get("output_token_details", {}).get("reasoning", 0) for one in each)
    return {
        "prompt_tokens": read,
        "completion_tokens": said,
        "total_tokens": read + said,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


class Pieces:
    """An answer's pieces as events of a stream: as few bytes, and as little work, for each as there can be.

    Args:
        number: Of the request.
        model: As the server calls it.
        one_call: Whether only the first of several calls of tools is told.
    """

    def __init__(self, number: str, model: str, *, one_call: bool) -> None:
        head = {"id": number, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._head, self._one_call = f"data: {json.dumps(head)[:-1]}, ", one_call

    def first(self, place: int) -> bytes:
        """Who speaks."""
        return self._choice(place, {"role": "assistant", "content": ""})

    def said(self, place: int, chunk: AIMessageChunk) -> bytes:
        """A piece; nothing if it tells nothing."""
        delta: dict[str, Any] = {}
        if isinstance(chunk.content, str):
            if chunk.content:
                delta["content"] = chunk.content
        else:
            delta |= {"content": text} if (text := str(chunk.text)) else {}
            delta |= {"reasoning_content": thoughts} if (thoughts := _thoughts(chunk)) else {}
        if chunk.tool_call_chunks:
            can_be_made = [each for each in chunk.tool_call_chunks if each["index"] is not None]
            calls = [_call(each) for each in can_be_made if not (self._one_call and each["index"])]
            delta |= {"tool_calls": calls} if calls else {}
        return self._choice(place, delta) if delta else b""

    def last(self, place: int, call: ChatCall) -> bytes:
        """Why an answer ended."""
        ending, broken = _ending(call), _broken(_said(call))
        choice = {"index": place, "delta": {"content": broken} if broken else {}, **ending}
        return self._event({"choices": [choice], "choreo": ending["choreo"]})

    def usage(self, calls: Sequence[ChatCall]) -> bytes:
        """What all of it cost."""
        return self._event({"choices": [], "usage": usage_of(calls)})

    def _choice(self, place: int, delta: dict[str, Any]) -> bytes:
        return (
            f'{self._head}"choices": [{{"index": {place}, "delta": {json.dumps(delta)}, "logprobs": null, '
            f'"finish_reason": null}}]}}\n\n'
        ).encode()

    def _event(self, more: dict[str, Any]) -> bytes:
        return f"{self._head}{json.dumps(more)[1:]}\n\n".encode()


def _call(piece: Any) -> dict[str, Any]:
    """A whole call of a tool."""
    function = {"name": piece["name"], "arguments": piece["args"]}
    return {"index": piece["index"], "function": function, "id": piece["id"], "type": "function"}
