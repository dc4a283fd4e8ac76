"""A message is the same streamed and whole, whatever a model writes of calls, and wherever it is cut."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk, HumanMessage
from support.checkpoints import FAMILIES, save_checkpoint
from support.speaking import speaking
from support.tool_templates import LLAMA3, TOOL_CHECKPOINTS

from choreo_agents import Engine, Memory, Sampling
from choreo_agents.chat import ChatCall, ChatRequest, streamed
from choreo_agents.models import load_model

MODELS = {**TOOL_CHECKPOINTS, "Llama 3.1": replace(FAMILIES["Llama 3.1"], template=LLAMA3)}
TOOLS: Any = tuple({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("note", "send"))
WRITTEN = {
    "Qwen 3": "<tool_call>\n{}\n</tool_call>",
    "listed": "<|tool_call_start|>[{}]<|tool_call_end|>",
    "Llama 3.1": "{}",
    "gpt-oss": " to=functions.note<|channel|>commentary json<|message|>{}<|call|>",
}
INSIDE = st.sampled_from(
    [
        '{"name": "note", "arguments": {"text": "a \\u00e9\u00e9\n"}}',
        '{"name": "send", "parameters": {"to": [1, {"b": null}], "text": "\U0001f600"}}',
        '[{"name": "note"}, {"name": "send", "args": {"text": "b"}}]',
        '{"name": "note", "kwargs": {"text": "a"}}',
        '{"text": "</tool_call>"}',
        '[[{"name": "note"}]]',
        'note(text="a", n=2), send()',
        'note("a")',
        "{}",
        "",
    ]
)
WORDS = st.sampled_from(["", "Let me see. ", "\u2028", "{", "\u00e9 \U0001f600", "<tool_call>", "\n\n"])


@cache
def engine_of(family: str) -> tuple[Engine, list[Any]]:
    model, said = load_model(save_checkpoint(Path(tempfile.mkdtemp()), MODELS[family])), list[Any]()
    return Engine.load(speaking(model, said), memory=Memory(kv_budget_bytes=1 << 25)), said


@pytest.mark.parametrize("family", MODELS)
@given(parts=st.lists(st.tuples(WORDS, INSIDE), min_size=1, max_size=3), data=st.data())
@settings(max_examples=12)
def test_pieces_add_up_to_the_message(family: str, parts: list[tuple[str, str]], data: Any) -> None:
    engine, said = engine_of(family)
    written = "".join(words + WRITTEN[family].replace("{}", inside, 1) for words, inside in parts)
    tokens = engine.model.encode(written)
    cut = data.draw(st.integers(1, len(tokens)) | st.just(len(tokens)))
    odd = data.draw(st.lists(st.integers(0, len(tokens)), max_size=2))
    for at in odd:  # parts of letters, and other words
        tokens.insert(at, data.draw(st.integers(0, 1000)))
    tokens = tokens[:cut]
    said.append([*tokens, engine.model.adapter.end_tokens[0]])
    most = data.draw(st.sampled_from([len(tokens), len(tokens) + 9]))
    thinking = False if engine.chat.thoughts is not None else None
    request = ChatRequest(tools=TOOLS, sampling=Sampling(max_tokens=max(1, most)), thinking=thinking, message_id="m")
    call = ChatCall(engine, [HumanMessage("Hi")], request)
    first, *rest = streamed(call)
    whole, message = first + rest if rest else first, call.message
    assert isinstance(whole, AIMessageChunk) and message is not None
    assert whole.tool_calls == message.tool_calls
    told = [(each["id"], each["name"], each["args"]) for each in message.invalid_tool_calls]
    assert [(each["id"], each["name"], each["args"]) for each in whole.invalid_tool_calls] == told
    assert str(whole.text).strip() == str(message.text).strip()
    assert whole.response_metadata["finish_reason"] == message.response_metadata["finish_reason"]
    pieces = [piece for chunk in (first, *rest) for piece in chunk.tool_call_chunks]
    assert len(pieces) == len(message.tool_calls) + len(message.invalid_tool_calls)
    valid = [piece for piece in pieces if piece["index"] is not None]
    assert [json.loads(piece["args"] or "") for piece in valid] == [each["args"] for each in message.tool_calls]
