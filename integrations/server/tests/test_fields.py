"""Fields of a request: each is honoured, harmless, or refused with what to say in its place."""

from __future__ import annotations

from typing import Any

import pytest
from choreo_server.asking import ChatBody, ChoreoFields, StreamOptions
from choreo_server.fields import Fields, Harmless, Instead, marks
from choreo_server.messages import FunctionIn, MessageIn, ToolCallIn
from openai.types import chat as openais
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from pydantic import ValidationError
from support.checkpoints import FAMILIES
from support.serving import QUESTION, WEATHER, asked, client_of, streamed
from support.speaking import engine_that_says
from support.tool_templates import TOOL_CHECKPOINTS

SAID = {"role": "assistant", "content": "Yes."}
HAVE: list[tuple[type[Fields], dict[str, Any]]] = [
    (ChatBody, {"messages": QUESTION}),
    (MessageIn, SAID),
    (ToolCallIn, {"id": "1", "function": {"name": "find"}}),
    (FunctionIn, {"name": "find"}),
    (StreamOptions, {}),
    (ChoreoFields, {}),
]
MARKED = [(kind, name, told, mark) for kind, told in HAVE for name, field in kind.model_fields.items()
          for mark in marks(field)]  # fmt: skip


def test_all_fields_of_openais_are_known() -> None:
    roles = ("System", "Developer", "User", "Assistant", "Tool", "Function")
    for ours, theirs in (
        (ChatBody, [CompletionCreateParamsStreaming]),
        (StreamOptions, [openais.ChatCompletionStreamOptionsParam]),
        (ToolCallIn, [openais.ChatCompletionMessageFunctionToolCallParam]),
        (MessageIn, [getattr(openais, f"ChatCompletion{role}MessageParam") for role in roles]),
    ):
        assert {name for kind in theirs for name in kind.__annotations__} <= set(ours.model_fields)


@pytest.mark.parametrize(("kind", "name", "told", "mark"), MARKED, ids=[f"{k.__name__}.{n}" for k, n, _, _ in MARKED])
def test_what_is_marked_is_harmless_or_refused_with_what_to_do(kind: Any, name: str, told: Any, mark: Any) -> None:
    left_out = kind.model_validate(told)
    for value in mark.unless if isinstance(mark, Instead) else ({"any": ["thing"]}, True):
        kind.model_validate(told | {name: value})
    assert kind.model_validate(told | {name: None}) == left_out
    if isinstance(mark, Instead):
        with pytest.raises(ValidationError, match="unsupported") as refused:
            kind.model_validate(told | {name: "it"})
        [error] = refused.value.errors()
        assert error["loc"] == (name,) and mark.say in error["msg"]
    else:
        assert isinstance(mark, Harmless)


@pytest.mark.parametrize(("kind", "told"), HAVE)
def test_null_is_a_field_left_out(kind: type[Fields], told: dict[str, Any]) -> None:
    nulls = {name: None for name, field in kind.model_fields.items() if not field.is_required() and name not in told}
    assert kind.model_validate(told | nulls).model_dump(exclude_none=True) == kind.model_validate(told).model_dump(
        exclude_none=True, exclude={"choreo"} if kind is ChatBody else None
    )


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "the nearest is temperature"),
        ({"max_token": 1}, "max_token", "max_tokens"),
        ({"priority": 1}, "priority", "choreo.priority"),
        ({"choreo": {"parent": []}}, "choreo.parent", "the nearest is parents"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
        ({"messages": [SAID | {"contents": ""}]}, "messages.0.contents", "the nearest is content"),
        ({"zzz": 1}, "zzz", "leave it out"),
        ({"functions": []}, "functions", "use `tools`"),
        ({"thinking": {"type": "disabled"}}, "thinking", 'reasoning_effort: "none"'),
        ({"messages": [*QUESTION, SAID | {"prefix": True}]}, "messages.1.prefix", "response_format"),
        ({"messages": [QUESTION[0] | {"reasoning": "Hm."}]}, "messages.0.reasoning", "of role 'assistant'"),
        ({"messages": [SAID | {"tool_call_id": "1"}]}, "messages.0.tool_call_id", "of role 'tool'"),
        ({"messages": [SAID | {"reasoning": "a", "reasoning_content": "b"}]}, "messages.0.reasoning", "leave one of"),
        ({"reasoning_effort": "banana"}, "reasoning_effort", "'none', 'minimal'"),
        ({"reasoning_effort": "none", "choreo": {"thinking": 9}}, "reasoning_effort", "leave one out"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 65}, "top_logprobs", "less than or equal to 64"),
    ],
)
async def test_what_is_refused_names_its_field_and_what_to_do(wrong: dict[str, Any], param: str, says: str) -> None:
    with engine_that_says(TOOL_CHECKPOINTS["Qwen 3"], "Hi.<|im_end|>") as (engine, _):
        async with client_of(engine) as client:
            error = (await asked(client, 400, **wrong))["error"]
            assert error["param"] == param and says in error["message"] and error["message"].startswith(param)


async def test_of_two_bounds_the_smaller_holds() -> None:
    with engine_that_says(TOOL_CHECKPOINTS["listed"], "Hello, I am here.<|im_end|>") as (engine, _):
        async with client_of(engine) as client:
            for one, other in ((3, 5), (5, 3)):
                said = await asked(client, max_tokens=one, max_completion_tokens=other)
                assert said["usage"]["completion_tokens"] == 3


async def test_all_that_a_model_has_said_before_reaches_its_prompt() -> None:
    call = {"id": "1", "index": 0, "type": "function", "function": {"name": "get_weather", "arguments": None}}
    for thoughts in ({"reasoning": "I look up."}, {"reasoning_content": "I look up.", "reasoning": "I look up."}):
        said = {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "annotations": [],
            "audio": None,
            **thoughts,
        }
        result = {"role": "tool", "tool_call_id": "1", "content": "sun"}
        with engine_that_says(TOOL_CHECKPOINTS["Qwen 3"], "Hi.<|im_end|>") as (engine, prompts):
            async with client_of(engine) as client:
                await asked(client, messages=[*QUESTION, said, result], tools=[WEATHER], reasoning_effort="none")
                assert prompts[-1].count("I look up.") == 1
                for refusal in ({"refusal": "I can not."}, {"content": [{"type": "refusal", "refusal": "I can not."}]}):
                    told = [*QUESTION, {"role": "assistant", **refusal}, *QUESTION]
                    await asked(client, messages=told, reasoning_effort="none")
                    assert "I can not." in prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_effort_is_told_to_a_template_that_knows_it_and_else_refused(stream: bool) -> None:
    says = "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
    with engine_that_says(FAMILIES["gpt-oss"], says) as (engine, prompts):
        async with client_of(engine) as client:
            for effort in ("low", "medium", "high"):
                ask = streamed(client, reasoning_effort=effort) if stream else asked(client, reasoning_effort=effort)
                await ask
                assert f"Reasoning: {effort}" in prompts[-1]
            told = {"reasoning_effort": "high", "choreo": {"reuse": "anywhere"}, "stream": stream}
            assert "whole prompts" in (await asked(client, 400, **told))["error"]["message"]
    for family in ("Qwen 3", "listed"):
        with engine_that_says(TOOL_CHECKPOINTS[family], "Hi.<|im_end|>") as (engine, _):
            async with client_of(engine) as client:
                error = (await asked(client, 400, reasoning_effort="high", stream=stream))["error"]
                assert "has no effect" in error["message"] and "thinking" in error["message"]
                await asked(client, reasoning_effort="none")
