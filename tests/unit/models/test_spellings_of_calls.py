"""Calls a little off their family's format: what is meant is read, and what is not understood in full is no call."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.templates import tokenizer_for
from support.tool_templates import tool_tokenizer

from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.chat.tool_prompt import tools_format
from choreo_agents.models.chat.tools.grammar import BrokenCall, ToolCall

TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "note": {"type": "object"},
    "send": {"type": "object"},
    "forget": {"type": "object", "properties": {"id": TEXT, "text": TEXT}},
    "run": {"type": "object", "properties": {"input": TEXT}},
}
TOOLS = [{"type": "function", "function": {"name": each, "parameters": SCHEMAS[each]}} for each in SCHEMAS]
MARKS = {
    "Qwen 3": "<tool_call>\n{}\n</tool_call>",
    "Hermes": "<tool_call>\n{}\n</tool_call>",
    "ours": "<tool_call>\n{}\n</tool_call>",
    "GLM-4.5": "<tool_call>{}\n</tool_call>",
    "listed": "<|tool_call_start|>[{}]<|tool_call_end|>",
    "Mistral": "[TOOL_CALLS] [{}]",
    "Llama 3.1": "{}",
}
"""What stands around a call in JSON; of gpt-oss it stands in a turn's header."""
A, B = ToolCall("note", {"text": "a"}), ToolCall("send", {"text": "b"})
ONE = '{"name": "note", "arguments": {"text": "a"}}'
TWO = '{"name": "send", "parameters": {"text": "b"}}'
MEANT = {
    '{"name": "note", "parameters": {"text": "a"}}': [A],
    '{"name": "note", "args": {"text": "a"}}': [A],
    '{"input": {"text": "a"}, "name": "note"}': [A],
    '{"name": "note", "arguments": "{\\"text\\": \\"a\\"}"}': [A],
    '{"id": "1", "index": 0, "type": "function", "function": {"name": "note", "arguments": {"text": "a"}}}': [A],
    '{"type": "function", "name": "note", "parameters": {"text": "a"}}': [A],
    '{"name": "note", "arguments": {"text": "a\nb"}}': [ToolCall("note", {"text": "a\nb"})],
    '{"name": "note"}': [ToolCall("note", {})],
    '{"name": "forget", "arguments": {"parameters": {"text": "a"}}}': [ToolCall("forget", {"text": "a"})],
    '{"name": "forget", "arguments": {"name": "forget", "args": {"id": "1"}}}': [ToolCall("forget", {"id": "1"})],
    '{"name": "run", "arguments": {"input": "a"}}': [ToolCall("run", {"input": "a"})],
    '{"name": "note", "arguments": {"input": "a"}}': [ToolCall("note", {"input": "a"})],
    f"[{ONE}, {TWO}]": [A, B],
    f"{ONE}, {TWO}": [A, B],
    f"{ONE}\n{TWO}": [A, B],
}
UNKNOWN = {
    "an unknown key": '{"name": "note", "text": "a"}',
    "an unknown key beside": '{"name": "note", "arguments": {}, "kwargs": {"text": "a"}}',
    "unknown beside the function": '{"type": "function", "function": {"name": "note"}, "arguments": {"text": "a"}}',
    "arguments in two places": '{"name": "note", "arguments": {}, "parameters": {"text": "a"}}',
    "one key twice": '{"name": "note", "arguments": {"text": "a"}, "arguments": {"text": "b"}}',
    "an argument twice": '{"name": "note", "arguments": {"text": "a", "text": "b"}}',
    "no object": '{"name": "note", "arguments": ["a"]}',
    "nothing in its place": '{"name": "note", "arguments": ""}',
    "no number": '{"name": "note", "arguments": {"text": 1e999}}',
    "an argument in the place of arguments": '{"name": "forget", "id": "1"}',
    "arguments and something else in their place": '{"name": "forget", "arguments": {"input": {"id": "1"}, "x": 1}}',
    "a text in the place of arguments": '{"name": "forget", "arguments": {"input": "1"}}',
    "wrapped again and again": '{"name": "forget", "arguments": ' + '{"args": ' * 400 + "{}" + "}" * 401,
    "another tool in it": '{"name": "forget", "arguments": {"name": "note", "arguments": {"id": "1"}}}',
    "half of a surrogate pair": '{"name": "note", "arguments": {"text": "\\ud800"}}',
    "cut off": '{"name": "note", "arguments": {"text": "a',
}


def read(family: str, text: str) -> tuple[str, list[ToolCall | BrokenCall]]:
    tokenizer = tokenizer_for("Gemma 3") if family == "ours" else tool_tokenizer(family)
    controls = [] if family == "ours" else [control for control in tokenizer.added_tokens_encoder if control.strip()]
    reader = tools_format(chat_format(tokenizer)).reader(TOOLS, controls)
    for piece in re.split(f"({'|'.join(map(re.escape, controls))})", text) if controls else [text]:
        reader.add(piece, is_control=piece in controls)
    reader.end()
    return reader.words.strip(), reader.calls


@pytest.mark.parametrize("family", MARKS)
@pytest.mark.parametrize("written", MEANT)
def test_what_is_meant_is_called(family: str, written: str) -> None:
    assert read(family, MARKS[family].replace("{}", written, 1)) == ("", MEANT[written])


@pytest.mark.parametrize("family", MARKS)
@pytest.mark.parametrize("written", UNKNOWN.values(), ids=[*UNKNOWN])
def test_what_is_not_understood_in_full_is_no_call(family: str, written: str) -> None:
    words, [broken] = read(family, MARKS[family].replace("{}", written, 1))
    assert isinstance(broken, BrokenCall) and broken.why and written.strip() in broken.text and not words
    assert broken.name in ("note", "forget", None) and not broken.text.startswith("{")


FAMILIES_OWN = {
    "GLM-4.5": [
        "note\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n<arg_key>text</arg_key>\n<arg_value>b</arg_value>",
        "note\ntext=a",
        'note{"text":"a"}',
        'note(text="a")',
        "note\n<arg_key>text</arg_key>\n<arg_value>a",
    ],
    "Qwen 3": [f"{ONE} or so", "note: a", "", json.dumps([1, 2]), f"[{ONE}, 1]"],
}


@pytest.mark.parametrize(("family", "written"), [(name, each) for name, all_ in FAMILIES_OWN.items() for each in all_])
def test_so_it_is_in_each_familys_own_form(family: str, written: str) -> None:
    words, calls = read(family, MARKS[family].replace("{}", written, 1))
    assert calls and all(isinstance(call, BrokenCall) and call.why and call.text for call in calls) and not words


@pytest.mark.parametrize("said", ['{"arguments": {"id": "1"}}', '{"name": "forget", "arguments": {"id": "1"}}'])
def test_a_wrapper_in_a_call_of_a_header_is_none_of_its_arguments(said: str) -> None:
    written = f" to=functions.forget<|channel|>commentary json<|message|>{said}<|call|>"
    assert read("gpt-oss", written) == ("", [ToolCall("forget", {"id": "1"})])


def test_what_a_model_invents_for_others_is_neither_said_nor_called() -> None:
    invented = "<|start|>user<|message|>Thanks, delete it.<|end|><|start|>assistant to=functions.forget<|message|>{}"
    said = "<|channel|>final<|message|>It rains.<|end|>"
    assert read("gpt-oss", f"{said}{invented}<|call|>") == ("It rains.", [])
    again = said + "<|start|>assistant<|channel|>final<|message|>And snows.<|end|>"
    assert read("gpt-oss", again) == ("It rains.\n\nAnd snows.", [])


@pytest.mark.parametrize("said", ["", "[1]", '{"text": "a"}', "{} and more"])
def test_a_header_with_a_tools_name_is_a_call_or_broken(said: str) -> None:
    """Also one of a tool that is not under the usual name space: it was no answer."""
    for to in ("functions.note", "browser.search"):
        words, [call] = read("gpt-oss", f" to={to}<|channel|>commentary json<|message|>{said}<|call|>")
        name = to.removeprefix("functions.")
        assert not words and call.name == name
        assert call == ToolCall(name, {"text": "a"}) if said.startswith('{"') else isinstance(call, BrokenCall)


@pytest.mark.parametrize(
    "said", ['{"answer": 4}', '{"name": "Ann", "arguments": {}}', "[1, 2]", "[a](b) {c}", '[{"a": 1}]']
)
def test_an_answer_in_json_stays_one_where_nothing_tells_calls_from_words(said: str) -> None:
    assert read("Llama 3.1", said) == (said, [])
