"""Chat completions, whole and streamed: OpenAI's fields in, OpenAI's answers out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from support.chat_scripts import ANSWER, CALLS, THOUGHTS, family_script
from support.chatty import save_chatty
from support.serving import QUESTION, WEATHER, added_up, asked, client_of, streamed
from support.speaking import engine_that_says
from support.tool_templates import TEXT_CHECKPOINTS, TOOL_CHECKPOINTS

from choreo_agents import Engine, Memory
from choreo_agents.chat import ChatCall, ChatRequest
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.testing import Script


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_chatty(tmp_path_factory.mktemp("chatty"), layers=2))


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[Engine]:
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        yield engine
        engine.check()


SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "max_tokens": 12}


async def test_an_answer_has_all_that_openais_has(engine: Engine) -> None:
    async with client_of(engine, name="chatty") as client:
        said = await asked(client, model="chatty", **SAMPLED)
        assert (said["object"], said["model"], said["id"][:9]) == ("chat.completion", "chatty", "chatcmpl-")
        [choice] = said["choices"]
        assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None
        first = said["usage"]
        assert first["completion_tokens"] == 12, "what closes the turn was not sampled"
        assert first["total_tokens"] == first["prompt_tokens"] + 12
        assert first["prompt_tokens_details"] == {"cached_tokens": 0}
        again = await asked(client, **SAMPLED)
        assert again["choices"][0]["message"] == choice["message"], "a seed says the same"
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < first["prompt_tokens"]


async def test_pieces_add_up_to_the_answer(engine: Engine) -> None:
    async with client_of(engine) as client:
        whole = await asked(client, **SAMPLED)
        events = await streamed(client, stream_options={"include_usage": True}, **SAMPLED)
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert len({event["id"] for event in events}) == 1
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        *pieces, usage = events
        assert len(pieces) > 5 and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
        said = added_up(pieces)
        assert said["content"].strip() == whole["choices"][0]["message"]["content"]
        assert said["finish_reason"] == "length"
        assert "usage" not in (await streamed(client, **SAMPLED))[-1], "nobody has asked for it"


async def test_several_answers_differ_and_read_the_prompt_once(engine: Engine) -> None:
    async with client_of(engine) as client:
        said = await asked(client, n=3, logprobs=True, top_logprobs=2, **SAMPLED)
        texts = [choice["message"]["content"] for choice in said["choices"]]
        assert [choice["index"] for choice in said["choices"]] == [0, 1, 2] and len(set(texts)) == 3
        assert said["usage"]["completion_tokens"] == 36
        prompt = said["usage"]["prompt_tokens"]
        assert engine.stats().tokens_encoded < 2 * prompt + 42
        told = said["choices"][1]["logprobs"]["content"]
        assert len(told) == 12 and all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 2 for each in told)
        events = await streamed(client, n=3, logprobs=True, **SAMPLED)
        assert [added_up(events, place)["content"].strip() for place in range(3)] == texts
        ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
        assert sorted(end["index"] for end in ends) == [0, 1, 2]
        assert all(len(end["logprobs"]["content"]) == 12 for end in ends)


async def test_it_stops_where_it_is_told_to(engine: Engine) -> None:
    async with client_of(engine) as client:
        whole = (await asked(client, **SAMPLED))["choices"][0]["message"]["content"]
        stop = whole[4:6]
        said = (await asked(client, stop=[stop], **SAMPLED))["choices"][0]
        assert said["finish_reason"] == "stop" and whole.startswith(said["message"]["content"])
        assert stop not in said["message"]["content"]
        assert added_up(await streamed(client, stop=stop, **SAMPLED))["content"].strip() == said["message"]["content"]


async def test_an_answer_keeps_to_a_schema(engine: Engine) -> None:
    short = {
        "type": "object",
        "properties": {"vote": {"enum": [1, 2]}},
        "required": ["vote"],
        "additionalProperties": False,
    }
    asked_for = {"type": "json_schema", "json_schema": {"name": "vote", "schema": short, "strict": True}}
    async with client_of(engine) as client:
        said = await asked(client, response_format=asked_for, max_tokens=60)
        assert json.loads(said["choices"][0]["message"]["content"])["vote"] in (1, 2)
        events = await streamed(client, response_format=asked_for, max_tokens=60)
        assert json.loads(added_up(events)["content"])["vote"] in (1, 2)


LONG = {"type": "object", "properties": {"a": {"type": "string", "minLength": 20}}, "required": ["a"]}


@pytest.mark.parametrize(
    "led",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"const": "so many boats"}},
            }
        },
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": LONG}}, "logprobs": True},
        {"tools": [WEATHER], "tool_choice": "required"},
    ],
    ids=["constant", "object", "call"],
)
async def test_a_led_answer_that_is_cut_is_one_that_is_cut(led: dict[str, Any], engine: Engine) -> None:
    async with client_of(engine) as client:
        for again in range(2):
            said = await asked(client, n=2, max_tokens=3, **led)
            assert [choice["finish_reason"] for choice in said["choices"]] == ["length", "length"], again
            assert said["choices"][0]["message"]["content"] and said["usage"]["completion_tokens"] == 6
            events = await streamed(client, max_tokens=3, **led)
            assert added_up(events)["finish_reason"] == "length"
            assert added_up(events)["content"] == said["choices"][0]["message"]["content"]
        handle = events[-1]["choreo"]["handle"]
        assert await asked(client, choreo={"parents": [handle]}, max_tokens=2), "what there is of it can be read"


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.slow] if family != "listed" else []) for family in CALLS]
)
async def test_tools_are_called_as_each_family_writes_it(family: str) -> None:
    question = [{"role": "user", "content": "What is the weather in San Francisco, CA?"}]
    told: dict[str, Any] = {"messages": question, "tools": [WEATHER], "choreo": {"thinking": False}}
    async with client_of(family_script(family).engine) as client:
        for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
            said = (await asked(client, tool_choice=choice, **told))["choices"][0]
            [call] = said["message"]["tool_calls"]
            assert said["finish_reason"] == "tool_calls" and said["message"]["content"] is None
            assert call["type"] == "function" and call["id"]
            assert json.loads(call["function"]["arguments"]) == {"location": "San Francisco, CA"}
        events = await streamed(client, **told)
        [piece] = added_up(events)["calls"]
        assert piece["name"] == "get_weather" and json.loads(piece["arguments"]) == {"location": "San Francisco, CA"}
        assert added_up(events)["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "It's sunny."}
        answer = await asked(client, **told | {"messages": [*question, said["message"], result]})
        assert answer["choices"][0]["message"]["content"] == ANSWER
        spoken = await asked(client, tool_choice="none", **told)
        assert spoken["choices"][0]["message"]["content"] == ANSWER


FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "place",
        "schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.mark.parametrize("family", CALLS)
async def test_it_calls_or_answers_in_the_form_whichever_it_begins(family: str) -> None:
    final = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    think = {"Qwen 3": "Hm.\n</think>\n\n", "gpt-oss": "Hm.<|end|><|start|>assistant", "listed": ""}[family]
    call = CALLS[family]("get_weather", {"location": "Bern"})
    answer = f'{final}{{"city": "Bern"}}' + ("<|return|>" if family == "gpt-oss" else "<|im_end|>")
    ways = [(call, 1), (answer, 0)]
    if family == "gpt-oss":  # as it is trained to write it
        trained = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        ways += [(trained + call.partition("<|message|>")[2], 1)]
    for says, calls in ways:
        with engine_that_says(TOOL_CHECKPOINTS[family], think + says) as (engine, _):
            async with client_of(engine) as client:
                told: dict[str, Any] = {"tools": [WEATHER], "response_format": FORM, "max_tokens": 90}
                choice = (await asked(client, **told))["choices"][0]
                whole, pieces = choice["message"], added_up(await streamed(client, **told))
                made = [each["function"] for each in whole.get("tool_calls", ())]
                assert pieces.get("calls", []) == made and pieces["content"] == (whole["content"] or "")
                assert pieces["finish_reason"] == choice["finish_reason"] == ("tool_calls" if calls else "stop")
                if calls:
                    assert [json.loads(each["arguments"]) for each in made] == [{"location": "Bern"}]
                    assert whole["content"] is None
                else:
                    assert not made and json.loads(whole["content"]) == {"city": "Bern"}
                assert (whole.get("reasoning_content") or "").strip() == ("Hm." if think else "")


PLACE: dict[str, Any] = {"name": {"type": "string"}, "parameters": {"type": ["object", "string"]}}


def json_form(properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


@pytest.mark.parametrize(
    ("family", "form", "says", "calls"),
    [
        ("Llama 3.1", json_form(PLACE), '{"name": "get_weather", "parameters": {"place": "Bern"}}', 0),
        ("Llama 3.1", json_form(PLACE), '{"name": "get_weather", "parameters": "none"}', 0),
        ("Llama 3.1", json_form(PLACE), '{"name": "get_weather", "parameters": {"location": "Bern"}}', 1),
        ("Llama 3.1", json_form(PLACE), '<|python_tag|>{"name": "get_weather", "parameters": {"location": "B"}}', 1),
        ("Llama 3.1", {"regex": ".*"}, '{"name": "get_weather", "parameters": {"location": "Bern"}} is a call', 0),
        (
            "Llama 3.1",
            {"regex": ".*"},
            '{"name": "get_weather", "parameters": {"location": "B"}}; '
            '{"name": "get_weather", "parameters": {"location": "C"}}',
            2,
        ),
        ("Hermes", {"regex": ".*"}, 'See <tool_call>{"name": "get_weather", "arguments": {}}</tool_call>', 0),
        ("Hermes", {"regex": "(?s:.*)"}, '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>', 0),
        ("Hermes", {"regex": "(?s:.*)"}, '<tool_call>\n{"name": "get_wea', 0),
        (
            "Hermes",
            {"regex": "(?s:.*)"},
            '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Bern"}}\n</tool_call>',
            1,
        ),
        (
            "Hermes",
            json_form({"note": {"type": "string"}}),
            "{\"note\": \"<tool_call>{'name': 'get_weather'}</tool_call>\"}",
            0,
        ),
    ],
)
async def test_an_answer_in_the_form_is_no_call_unless_the_calls_grammar_takes_it(
    family: str, form: dict[str, Any], says: str, calls: int
) -> None:
    """Whatever it looks like, or quotes, where calls are ordinary text."""
    end = {"Llama 3.1": "<|eot_id|>", "Hermes": "<|im_end|>"}[family]
    told: dict[str, Any] = {"tools": [WEATHER], "response_format": form, "max_tokens": 150, "reasoning_effort": "none"}
    with engine_that_says(TEXT_CHECKPOINTS[family], says + end) as (engine, _):
        async with client_of(engine) as client:
            choice = (await asked(client, **told))["choices"][0]
            pieces = added_up(await streamed(client, **told))
    whole = choice["message"]
    made = [each["function"] for each in whole.get("tool_calls", ())]
    assert len(made) == calls and whole["content"] == (None if calls else says)
    assert all(json.loads(each["arguments"]).keys() == {"location"} for each in made)
    assert pieces.get("calls", []) == made and pieces["content"] == (whole["content"] or "")
    assert pieces["finish_reason"] == choice["finish_reason"] == ("tool_calls" if calls else "stop")


async def test_a_choice_of_tools_says_whether_the_form_is_the_answers() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Bern"}}\n</tool_call><|im_end|>'
    answer = '{"city": "Bern"}<|im_end|>'
    told: dict[str, Any] = {"tools": [WEATHER], "response_format": FORM, "reasoning_effort": "none", "max_tokens": 60}
    for says, choice in ((call, "required"), (call, "auto"), (answer, "none"), (answer, "auto")):
        with engine_that_says(TOOL_CHECKPOINTS["Qwen 3"], says) as (engine, _):
            async with client_of(engine) as client:
                message = (await asked(client, tool_choice=choice, **told))["choices"][0]["message"]
                assert ("tool_calls" in message) == (says == call)
                other = "none" if says == call else "required"
                await asked(client, 400, tool_choice=other, **told)


async def test_thoughts_are_told_apart(engine: Engine) -> None:
    script = family_script("Qwen 3")
    async with client_of(script.engine) as client:
        said = await asked(client, choreo={"thinking": 50})
        assert said["choices"][0]["message"]["reasoning_content"].strip() == THOUGHTS
        assert said["choices"][0]["message"]["content"] == ANSWER
        assert 0 < said["usage"]["completion_tokens_details"]["reasoning_tokens"] < said["usage"]["completion_tokens"]
        whole = added_up(await streamed(client, choreo={"thinking": 50}))
        assert (whole["reasoning_content"].strip(), whole["content"].strip()) == (THOUGHTS, ANSWER)
        quiet = await asked(client, reasoning_effort="none")
        assert "reasoning_content" not in quiet["choices"][0]["message"]
        again = [*QUESTION, said["choices"][0]["message"], *QUESTION]
        assert (await asked(client, messages=again, choreo={"thinking": False}))["choices"][0][
            "finish_reason"
        ] == "stop"


@pytest.mark.parametrize(
    ("wrong", "status", "says"),
    [
        ({"n": 0}, 400, "n: Input should be greater"),
        ({"n": 99}, 400, "n: at most 16"),
        ({"model": "gpt-4o"}, 404, "no model 'gpt-4o'"),
        ({"messages": []}, 400, "messages: List should have"),
        ({"messages": [{"role": "nobody", "content": ""}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "more than text, 'image_url'"),
        ({"messages": [{"role": "user", "content": "so " * 5000}]}, 400, "context"),
        ({"top_p": 7}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"tools": [WEATHER], "tool_choice": "find"}, 400, "tool_choice='find' names no tool"),
        ({"response_format": {"type": "xml"}}, 400, "response_format must be"),
        ({"response_format": {"type": "json_object", "schema": {}}}, 400, "response_format must be"),
        ({"response_format": {"type": "json_schema"}}, 400, "has no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "vote"}}}, 400, "has no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, 400, "has no schema"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, 400, "more than text"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": "x"}}, 400, "names no tool"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, 400, "must be a JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "so " * 9000}}]}, 400, "tokens, but"),
        ({"choreo": {"thinking": True}}, 400, "does not support it"),
        ({"choreo": {"inherits": ["a.system"]}}, 400, 'use reuse="anywhere"'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_answered_says_why(
    wrong: dict[str, Any], status: int, says: str, stream: bool, engine: Engine
) -> None:
    async with client_of(engine) as client:
        error = (await asked(client, status, stream=stream, **wrong))["error"]
        assert says in error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": "\\ud800"}', "[1]"])
async def test_calls_that_nobody_can_read_are_told_as_they_were_written(arguments: str, engine: Engine) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    async with client_of(engine) as client:
        told = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, *QUESTION]
        response = await client.post("/v1/chat/completions", json={"messages": told, "max_tokens": 2})
        assert response.status_code in (200, 400) and "server_error" not in response.text


async def test_calls_that_a_model_breaks_are_words_streamed_or_not() -> None:
    """The protocol has no place for them; those that can be made are told beside."""
    well = '<tool_call>\n{"name": "get_weather", "parameters": {"location": "Bern"}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "get_weather", "where": "Bern"}\n</tool_call>'
    for says, calls in ((f"Hm. {broken}", 0), (broken + well + well, 2), (well, 1)):
        with engine_that_says(TOOL_CHECKPOINTS["Qwen 3"], f"{says}<|im_end|>") as (engine, _):
            async with client_of(engine) as client:
                for one in (False, True):
                    told: Any = {"tools": [WEATHER], "reasoning_effort": "none", "parallel_tool_calls": not one}
                    choice = (await asked(client, **told))["choices"][0]
                    whole = choice["message"]
                    made = [each["function"] for each in whole.get("tool_calls", ())]
                    pieces = added_up(await streamed(client, **told))
                    assert [json.loads(call["arguments"]) for call in made] == [{"location": "Bern"}] * (
                        min(calls, 1) if one else calls
                    )
                    assert pieces.get("calls", []) == made and pieces["content"] == (whole["content"] or "")
                    assert ('"where": "Bern"' in pieces["content"]) == ("where" in says)
                    assert pieces["finish_reason"] == choice["finish_reason"] == ("tool_calls" if calls else "stop")


async def test_a_preamble_of_gpt_oss_does_not_end_its_turn() -> None:
    start = "I plan.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    call = ' to=functions.get_weather<|channel|>commentary json<|message|>{"location": "Bern"}<|call|>'
    answer = "<|channel|>final<|message|>It rains.<|return|>"
    for says, words, calls in ((start + call, "I look it up.", 1), (start + answer, "I look it up.\n\nIt rains.", 0)):
        with engine_that_says(TOOL_CHECKPOINTS["gpt-oss"], says) as (engine, _):
            async with client_of(engine) as client:
                whole = (await asked(client, tools=[WEATHER]))["choices"][0]["message"]
                pieces = added_up(await streamed(client, tools=[WEATHER]))
                assert whole["content"] == pieces["content"] == words and whole["reasoning_content"] == "I plan."
                assert len(whole.get("tool_calls", ())) == len(pieces.get("calls", ())) == calls


@pytest.mark.parametrize("family", ["Qwen 3", "gpt-oss", "listed"])
async def test_all_that_is_sampled_counts(family: str) -> None:
    """Thoughts, too: where they use up what there may be there is no answer."""
    close = {
        "Qwen 3": "\n</think>\n\n",
        "gpt-oss": "<|end|><|start|>assistant<|channel|>final<|message|>",
        "listed": "",
    }[family]
    end = "<|return|>" if family == "gpt-oss" else "<|im_end|>"
    with engine_that_says(TOOL_CHECKPOINTS[family], f"I think it over.{close}Hello, I am here.{end}") as (engine, _):
        long = len(engine.model.encode(f"I think it over.{close}")) + 2
        async with client_of(engine) as client:
            for field in ("max_tokens", "max_completion_tokens"):
                for most in (1, 4, long, 200):
                    told: dict[str, Any] = {field: most, "stream_options": {"include_usage": True}}
                    said = await asked(client, **{field: most})
                    choice, used = said["choices"][0], said["usage"]
                    assert used["completion_tokens"] <= most
                    assert choice["finish_reason"] == ("stop" if most == 200 else "length")
                    answer = choice["message"]["content"]
                    if family != "listed":
                        assert choice["message"]["reasoning_content"] and bool(answer) == (most >= long)
                        assert used["completion_tokens_details"]["reasoning_tokens"] <= used["completion_tokens"]
                    events = await streamed(client, **told)
                    assert added_up(events)["content"] == answer and events[-1]["usage"] == used | {
                        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]
                    }


async def test_long_tools_are_encoded_on_a_thread(engine: Engine) -> None:
    function = {"name": "f", "description": "so " * 9000}
    request = ChatRequest(tools=({"type": "function", "function": function},))
    assert ChatCall(engine, [HumanMessage("Hi")], request).is_long
    assert not ChatCall(engine, [HumanMessage("Hi")], ChatRequest()).is_long


async def test_what_is_no_json_is_a_bad_request(engine: Engine) -> None:
    async with client_of(engine) as client:
        response = await client.post("/v1/chat/completions", content=b'{"messages": [')
        assert response.status_code == 400 and "Invalid JSON" in response.json()["error"]["message"]
        got = await client.get("/v1/chat/completions")
        assert got.status_code == 405 and got.headers["Allow"] == "POST"
        assert got.json()["error"]["message"].endswith("Use POST /v1/chat/completions")
        for path in ("/chat/completions", "/v1/completions", "/v1/v1/chat/completions", "/api/v1/chat/completions"):
            missing = (await client.post(path, json={"messages": QUESTION})).json()["error"]
            assert missing["type"] == "not_found_error"
            assert missing["message"].endswith("Use POST /v1/chat/completions"), path
        missing = (await client.get("/v1/nothing/else")).json()["error"]
        assert "POST /v1/chat/completions or GET /v1/models" in missing["message"]


async def test_models_health_and_metrics(engine: Engine) -> None:
    async with client_of(engine, name="chatty") as client:
        [model] = (await client.get("/v1/models")).json()["data"]
        assert model["id"] == "chatty" and (await client.get("/v1/models/chatty")).json() == model
        assert (await client.get("/v1/models/else")).status_code == 404
        assert (await client.get("/health")).json() == {"status": "ok"}
        await asked(client, max_tokens=3)
        lines = (await client.get("/metrics")).text.splitlines()
        values = dict(line.rsplit(maxsplit=1) for line in lines if line[0] != "#")
        assert float(values["choreo_finished_total"]) > 0 and float(values["choreo_kv_bytes"]) > 0
        assert values['choreo_http_requests_total{status="404"}'] == "1"
        assert values["choreo_answers_under_way"] == "0"
        [info] = [name for name in values if name.startswith("choreo_engine_info{")]
        assert f'backend="{engine.stats().backend}"' in info and "forward=" in info and values[info] == "1"


@pytest.mark.parametrize("budget", [None, 1 << 13], ids=["the model's", "the memory's"])
async def test_langchains_client_knows_a_full_context(budget: int | None) -> None:
    memory = {} if budget is None else {"memory": Memory(kv_budget_bytes=budget)}
    with Script(default="Hello.", context=300 if budget is None else 4096).load(**memory) as engine:
        async with client_of(engine, name="m") as http:
            chat = ChatOpenAI(model="m", base_url="http://localhost/v1", api_key="none", http_async_client=http)  # type: ignore[arg-type]
            with pytest.raises(ContextOverflowError, match="maximum context length"):
                await chat.ainvoke("boats " * 600)
            with pytest.raises(ContextOverflowError, match="maximum context length"):
                [piece async for piece in chat.astream("boats " * 600)]
