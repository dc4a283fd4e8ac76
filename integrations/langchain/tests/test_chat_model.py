"""What `ChatChoreo` does beside what every chat model does."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
from collections.abc import Iterator
from copy import deepcopy
from typing import Any
from unittest.mock import ANY

import pytest
from langchain_choreo import ChatChoreo
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel
from support.chat_scripts import ANSWER, JOKE, THOUGHTS, family_script
from support.chatty import save_chatty
from support.speaking import engine_that_says
from support.stepping import Steps, until
from support.tool_templates import TOOL_CHECKPOINTS

from choreo_agents import Engine, Memory
from choreo_agents.engine.constraints import Detokenizer
from choreo_agents.errors import InvalidRequestError, ModelNotFoundError
from choreo_agents.models import LoadedModel, load_model

SALT = "a secret of somebody's"


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return "It's sunny."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_chatty(tmp_path_factory.mktemp("chatty"), layers=2))


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[Engine]:
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        yield engine
        engine.check()


@pytest.fixture
def chat(engine: Engine) -> ChatChoreo:
    return ChatChoreo(engine=engine, max_tokens=8)


def cached(message: Any) -> int:
    found: int = message.usage_metadata["input_token_details"]["cache_read"]
    return found


class Heard(BaseCallbackHandler):
    """All that a tracer is told, as text."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_chat_model_start(self, *args: Any, **more: Any) -> None:
        self.told.append(repr((args, more)))


async def test_a_batch_shares_the_engines_steps(chat: ChatChoreo, engine: Engine) -> None:
    def asked() -> int:
        with engine._core.lock:
            return sum(request.decoding is not None for request in engine._core.loop.requests_of(engine._tenant.name))

    steps = Steps(engine)
    batch = asyncio.create_task(asyncio.to_thread(chat.batch, [f"Candidate {number}?" for number in range(4)]))
    await until(lambda: batch.done() or asked() == 4)
    steps.go_on()
    assert len(await batch) == 4
    assert engine.stats().rows_per_decode_step > 2


async def test_so_it_does_on_an_event_loop(chat: ChatChoreo, engine: Engine) -> None:
    questions = [f"Candidate {number}?" for number in range(4)]
    said = await chat.abatch(questions)
    assert engine.stats().rows_per_decode_step > 2
    assert [each.text for each in said] == [each.text for each in chat.batch(questions)]


async def test_tokens_that_nobody_reads_stay_on_the_engines_thread(
    chat: ChatChoreo, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, add = list[int](), Detokenizer.add
    monkeypatch.setattr(Detokenizer, "add", lambda self, token: added.append(token) or add(self, token))
    answers = [chat.invoke("Who?"), await chat.ainvoke("Who?")]
    assert not added
    streamed = "".join(str(chunk.text) for chunk in chat.stream("Who?"))
    assert [answer.text for answer in answers] == [streamed] * 2 and len(added) == 8


def test_a_thread_keeps_what_its_calls_have_read(chat: ChatChoreo, engine: Engine) -> None:
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    chat.invoke("For whom?", config)
    assert cached(chat.invoke("For whom?", config)) > 0
    # So it is inside a graph or chain, whose config nobody hands on.
    RunnableLambda(lambda words: [chat.invoke(words)]).invoke("Why?", {"configurable": {"thread_id": "u"}})
    for thread in ("t", "u"):
        held = engine.stats().leases
        engine.threads.forget(thread)
        assert engine.stats().leases < held
    assert engine.stats().leases == 0


@pytest.mark.parametrize("version", ["stream", "events"])
def test_streams_are_their_threads_too(chat: ChatChoreo, engine: Engine, version: str) -> None:
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    pieces: Any = (
        chat.stream("Why?", config) if version == "stream" else chat.stream_events("Why?", config, version="v3")
    )
    assert list(pieces)
    assert engine.stats().leases > 0
    engine.threads.forget("t")
    assert engine.stats().leases == 0


def test_a_child_inherits_what_its_parent_has_read(engine: Engine) -> None:
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    parent = ChatChoreo(engine=engine, reuse="anywhere", agent="parent", max_tokens=8)
    talk: list[Any] = [HumanMessage("Whom does each of the three candidates vote for?")]
    talk.append(parent.invoke([SystemMessage("You count votes."), *talk], config))
    told = [SystemMessage("You are a critic."), *talk, HumanMessage("Right?")]
    child = ChatChoreo(engine=engine, reuse="anywhere", agent="child", max_tokens=8, inherits=("parent.system",))
    system = chat_tokens(engine, told[:1])
    assert cached(child.invoke(told, config)) > 20
    assert cached(child.invoke(told, {"configurable": {"thread_id": "other"}})) <= system, "another's are not looked at"


def chat_tokens(engine: Engine, messages: list[Any]) -> int:
    return ChatChoreo(engine=engine).get_num_tokens_from_messages(messages)


def test_nothing_is_found_across_tenants_and_no_salt_is_told(engine: Engine) -> None:
    heard = Heard()
    chat = ChatChoreo(
        engine=engine, max_tokens=8, tenant=lambda config: f"{SALT} {config['configurable']['user']}", callbacks=[heard]
    )
    for user in ("ann", "bob"):
        config: RunnableConfig = {"configurable": {"user": user}}
        assert cached(chat.invoke("For whom?", config)) == 0
        assert cached(chat.invoke("For whom?", config)) > 0
        assert list(chat.stream("For whom?", config))
    assert heard.told and not any(SALT in told for told in heard.told)
    assert engine.stats().tokens_encoded == 0, "all that was encoded is a tenant's"
    nobody = ChatChoreo(engine=engine, tenant=lambda config: "")
    with pytest.raises(ValueError, match="salt"):
        nobody.invoke("For whom?")


def test_langchains_cache_answers_for_one_tenant_in_all_its_threads(engine: Engine) -> None:
    chat = ChatChoreo(
        engine=engine, max_tokens=8, cache=InMemoryCache(), tenant=lambda config: config["configurable"]["user"]
    )
    first = chat.invoke("For whom?", {"configurable": {"user": "ann", "thread_id": "t"}})
    steps = engine.tenant("ann").stats().steps
    again = chat.invoke("For whom?", {"configurable": {"user": "ann", "thread_id": "u"}})
    assert again.text == first.text and engine.tenant("ann").stats().steps == steps
    chat.invoke("For whom?", {"configurable": {"user": "bob"}})
    assert engine.tenant("bob").stats().steps > 0


def test_so_it_does_for_who_asks_it_to_generate(engine: Engine) -> None:
    """Chains of old do: no config comes along."""
    user = ["ann"]
    cache = InMemoryCache()
    chat = ChatChoreo(engine=engine, max_tokens=8, cache=cache, tenant=lambda config: user[0])
    for user[0] in ("ann", "bob"):
        chat.generate([[HumanMessage("For whom?")]])
        assert engine.tenant(user[0]).stats().steps > 0
    steps = engine.tenant("bob").stats().steps
    chat.invoke("For whom?")
    assert engine.tenant("bob").stats().steps == steps


def test_a_model_is_loaded_once_for_all_copies(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = Engine.load
    monkeypatch.setattr(Engine, "load", lambda name, **more: loaded.append(name) or load(model, **more))
    chat = ChatChoreo(model="a/folder", max_tokens=2, load_options={"memory": Memory(kv_budget_bytes=1 << 25)})
    warmer = chat.configurable_fields(temperature=ConfigurableField(id="temperature"))
    for copied in (warmer, deepcopy(chat), chat.model_copy(), chat.bind(seed=1)):
        assert copied.invoke("Why?", {"configurable": {"temperature": 0.5}}).usage_metadata
    assert loaded == ["a/folder"]
    again = pickle.loads(pickle.dumps(chat))
    assert again.model == chat.model and again.engines != chat.engines
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert chat.invoke("Why?").usage_metadata
    assert len(loaded) == 2, "a process that was forked cannot use its parent's"
    monkeypatch.undo()
    del warmer, copied, chat
    gc.collect()
    with pytest.raises(ModelNotFoundError):
        again.invoke("Why?")


def test_a_copy_has_the_same_engine(chat: ChatChoreo) -> None:
    assert deepcopy(chat).engine is chat.engine


def test_an_engine_answers_for_no_model_but_its_own(chat: ChatChoreo) -> None:
    named = chat.configurable_fields(model=ConfigurableField(id="model"))
    own = {"configurable": {"model": chat.model}}
    assert named.invoke("Why?", own).usage_metadata
    with pytest.raises(ModelNotFoundError):
        named.invoke("Why?", {"configurable": {"model": "no/folder"}})


def test_one_text_is_no_list_of_letters(chat: ChatChoreo) -> None:
    whole = chat.invoke("Why?", seed=1).text
    assert chat.invoke("Why?", seed=1, stop=whole[2:5]).text == whole[:2].strip()  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must be a list"):
        chat.invoke("Why?", reuse="anywhere", inherits="parent.system")


def test_two_who_are_asked_the_same_make_calls_of_their_own() -> None:
    chat = ChatChoreo(engine=family_script("listed").engine, thinking=False).bind_tools([get_weather])
    made: list[Any] = [list(chat.stream("weather in San Francisco")) for _ in range(2)]
    one, other = (sum(pieces[1:], start=pieces[0]).tool_calls[0] for pieces in made)
    assert one["args"] == other["args"] and one["id"] != other["id"]


def test_seeds_and_log_probabilities(chat: ChatChoreo) -> None:
    one, other = (chat.invoke("Say.", temperature=1.0, seed=3, logprobs=True, top_logprobs=2) for _ in range(2))
    assert one.text == other.text != chat.invoke("Say.", temperature=1.0, seed=4).text
    told = one.response_metadata["logprobs"]["content"]
    assert len(told) == 8 and all(len(each["top_logprobs"]) == 2 and each["logprob"] < 0 for each in told)
    assert "logprobs" not in chat.invoke("Say.").response_metadata


def test_tokens_are_counted_as_a_call_reads_them(chat: ChatChoreo) -> None:
    messages = [SystemMessage("You vote."), HumanMessage("For whom?")]
    said = chat.invoke(messages)
    assert said.usage_metadata is not None
    assert chat.get_num_tokens_from_messages(messages) == said.usage_metadata["input_tokens"]
    assert chat.get_num_tokens_from_messages(messages, [get_weather]) > said.usage_metadata["input_tokens"]
    assert chat.get_num_tokens("<|im_end|>") > 1, "words are no control tokens"


def test_stock_runnables_hold_it(chat: ChatChoreo) -> None:
    bound = chat.bind(stop=["zzz"]).with_config(tags=["a"]).with_retry(stop_after_attempt=2)
    assert bound.invoke("Why?").usage_metadata
    failing = chat.bind(max_tokens=1 << 20).with_fallbacks([chat])
    assert failing.invoke("Why?").usage_metadata


def test_what_a_call_cannot_ask_is_refused(chat: ChatChoreo, engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="no argument 'frequency'"):
        chat.invoke("Why?", frequency=1)
    with pytest.raises(InvalidRequestError, match="names no tool"):
        chat.bind_tools([get_weather], tool_choice="find")
    with pytest.raises(InvalidRequestError, match="thinking"):
        chat.invoke("Why?", thinking=True)
    with pytest.raises(InvalidRequestError, match="more than text"):
        chat.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])])
    with pytest.raises(ValueError, match="has no model"):
        ChatChoreo()
    with pytest.raises(ValueError, match="inherited"):
        ChatChoreo(engine=engine, inherits=("parent.system",))
    assert engine.stats().unfinished == 0


@pytest.mark.parametrize("include_raw", [False, True])
def test_it_calls_its_tools_and_then_answers_in_the_form(include_raw: bool) -> None:
    """As an agent of LangChain's with tools and a `ProviderStrategy` asks it; streamed, too."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Bern"}}\n</tool_call><|im_end|>'

    def says(prompt: str) -> str:
        return f"{json.dumps(JOKE)}<|im_end|>" if "sunny" in prompt else call

    with engine_that_says(TOOL_CHECKPOINTS["Qwen 3"], says) as (engine, _):
        chat = ChatChoreo(engine=engine, thinking=False)
        tools = [convert_to_openai_tool(get_weather)]
        typed = chat.with_structured_output(Joke, include_raw=include_raw, tools=tools)
        form = {"type": "json_schema", "json_schema": {"name": "Joke", "schema": Joke.model_json_schema()}}
        agent = chat.bind_tools([get_weather], response_format=form)
        asked: list[Any] = [HumanMessage("Tell me a joke about the weather in Bern.")]
        called: Any = agent.invoke(asked)
        pieces: Any = sum_of(agent.stream(asked))
        for said in (called, pieces):
            assert [each["args"] for each in said.tool_calls] == [{"location": "Bern"}] and not said.text
        assert typed.invoke(asked) == ({"raw": ANY, "parsed": None, "parsing_error": None} if include_raw else None)
        asked += [called, ToolMessage("It's sunny.", tool_call_id=called.tool_calls[0]["id"])]
        for said in (agent.invoke(asked), sum_of(agent.stream(asked))):
            assert json.loads(said.text) == JOKE and not said.tool_calls
        typed_said: Any = typed.invoke(asked)
        assert (typed_said["parsed"] if include_raw else typed_said) == Joke(**JOKE)


def sum_of(pieces: Iterator[Any]) -> Any:
    first, *rest = pieces
    return sum(rest, first)


def test_thoughts_come_as_blocks_of_reasoning_and_are_counted() -> None:
    script = family_script("Qwen 3")
    chat = ChatChoreo(engine=script.engine, thinking=50)
    said = chat.invoke("Who are you?")
    assert said.content == [{"type": "reasoning", "reasoning": THOUGHTS}, {"type": "text", "text": ANSWER}]
    assert said.usage_metadata is not None
    assert said.usage_metadata["output_token_details"]["reasoning"] > 0
    *pieces, last = chat.stream("Who are you?")
    whole: Any = sum(pieces[1:], start=pieces[0]) + last
    assert whole.text == ANSWER
    assert [block["reasoning"] for block in whole.content_blocks if block["type"] == "reasoning"] == [THOUGHTS]
    chat.invoke([HumanMessage("Who are you?"), said, HumanMessage("And who am I?")])
    assert THOUGHTS not in script.prompts[-1], "this template does not show them again"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("family", ["Qwen 3", "listed", "gpt-oss"])
def test_every_method_gives_structured_output(family: str, method: Any) -> None:
    chat = ChatChoreo(engine=family_script(family).engine, thinking=False)
    found: Any = chat.with_structured_output(Joke, method=method, include_raw=True).invoke("A joke about cats.")
    assert found["parsed"] == Joke(**JOKE) and found["parsing_error"] is None
    assert isinstance(found["raw"], AIMessage)
    assert found["raw"].response_metadata["finish_reason"] == ("tool_calls" if method == "function_calling" else "stop")


def test_no_tool_is_told_of_that_cannot_be_called() -> None:
    script = family_script("listed")
    chat = ChatChoreo(engine=script.engine, thinking=False)
    assert not chat.bind_tools([get_weather], tool_choice="none").invoke("weather in San Francisco").tool_calls
    assert "get_weather" not in script.prompts[-1]
    assert chat.bind_tools([get_weather]).invoke("weather in San Francisco").tool_calls
    assert "get_weather" in script.prompts[-1]
