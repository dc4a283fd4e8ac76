"""What traces tell of a graph's runs: what was read and said, at what cost, how it ended, and that it has ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableConfig
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt
from support.graphs import QUESTION
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    ChoreoState,
    Engine,
    Memory,
    Policy,
    RunOptions,
    Sampling,
    Schema,
    Synthesizer,
    Worker,
)
from choreo_agents.errors import AdapterError, InvalidRequestError, ScriptError
from choreo_agents.graph.view.view_builder import MASK
from choreo_agents.models import load_model
from choreo_agents.testing import Script


class Runs(BaseCallbackHandler):
    """Notes the model runs that callbacks are told of."""

    raise_error = True

    def __init__(self) -> None:
        self.started: dict[Any, dict[str, Any]] = {}
        self.chunks: dict[Any, list[AIMessageChunk]] = {}
        self.ended: dict[Any, AIMessage] = {}
        self.failed: dict[Any, BaseException] = {}

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: Any, **said: Any) -> None:
        assert run_id not in self.started
        self.started[run_id], self.chunks[run_id] = said | {"messages": messages[0]}, []

    def on_llm_new_token(self, token: str, *, chunk: Any = None, run_id: Any, **_: Any) -> None:
        assert run_id not in self.over, "nothing is said after the end"
        self.chunks[run_id].append(chunk.message)

    def on_llm_end(self, response: Any, *, run_id: Any, **_: Any) -> None:
        assert run_id not in self.over
        [[generation]] = response.generations
        self.ended[run_id] = generation.message

    def on_llm_error(self, error: BaseException, *, run_id: Any, **_: Any) -> None:
        assert run_id not in self.over
        self.failed[run_id] = error

    @property
    def over(self) -> set[Any]:
        return {*self.ended, *self.failed}

    def read(self, name: str) -> list[tuple[str, Any]]:
        """What an agent's last run read."""
        [*_, run] = [run for run in self.started.values() if run["name"] == name]
        return [(message.type, message.content) for message in run["messages"]]

    def check(self) -> None:
        """Every run is over, and pieces add up to what it said."""
        assert self.over == self.started.keys()
        for run, message in self.ended.items():
            assert_same(added(self.chunks[run]), message)


def added(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def assert_same(whole: AIMessageChunk, message: AIMessage) -> None:
    blocks: Any = whole.content
    if isinstance(blocks, list):
        blocks = [{name: value for name, value in block.items() if name != "index"} for block in blocks]
    assert blocks == message.content
    assert (whole.id, whole.usage_metadata) == (message.id, message.usage_metadata)
    assert whole.response_metadata == message.response_metadata and whole.chunk_position == "last"


def config(runs: Runs, **options: Any) -> RunnableConfig:
    return {"callbacks": [runs], "configurable": {"choreo": RunOptions(**options)}}


def chain(*agents: Agent, **options: Any) -> ChoreoGraph:
    graph = ChoreoGraph(visibility="shared", **({"system": "Be brief."} | options))
    for before, agent in zip((START, *(each.name for each in agents)), agents, strict=False):
        graph.add_node(agent).add_edge(before, agent.name)
    return graph.add_edge(agents[-1].name, END)


@pytest.fixture
def scripted() -> Iterator[Engine]:
    lines = {"ann": "Ann has three.", "bob": ["Two, I think.", "No: three."], "carl": "Done."}
    with Script(lines, default="Well.").load(memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        yield engine


def test_callbacks_are_shown_the_whole_conversation(scripted: Engine) -> None:
    runs = Runs()
    bob = {"system": "You are Bob.", "persona": "bob", "prompt": "What do you say?"}
    graph = chain(Agent("ann", system=lambda _: "You are Ann."), Agent("bob", **bob), Agent("carl"))
    graph.add_node("again", Agent("bob", **(bob | {"prompt": "And now?"}))).add_edge("carl", "again")
    graph.compile(engine=scripted).invoke(QUESTION, config(runs))
    root, asked = ("system", "Be brief."), ("human", "What does Ann have?")
    ann, bobs = ("ai", "Ann has three."), [("human", "What do you say?"), ("ai", "Two, I think.")]
    assert runs.read("ann") == [root, ("system", "You are Ann."), asked]
    assert runs.read("bob") == [root, ("system", "You are Bob."), asked, ann, bobs[0]]
    assert runs.read("carl") == [root, asked, ann, bobs[1]], "what bob was told and asked is his"
    said = [asked, ann, *bobs, ("ai", "Done.")]
    assert runs.read("again") == [root, ("system", "You are Bob."), *said, ("human", "And now?")]
    runs.check()


SECRETS = ("You plan.", "Which plan?", "Ann has three.", "You are Carl.", "Now?")


@pytest.mark.parametrize("shown", [False, True])
def test_what_is_confidential_is_masked_unless_it_is_asked_for(scripted: Engine, shown: bool) -> None:
    runs = Runs()
    graph = chain(
        Agent("ann", system="You plan.", prompt="Which plan?", confidential=True),
        Agent("bob", system="You are Bob."),
        Agent("carl", system="You are Carl.", prompt="Now?"),
        policy=Policy(confidential={"carl.system": frozenset({"ann", "bob"})}),
    ).set_visibility("ann", "bob", "reencoded")
    graph.compile(engine=scripted).invoke(QUESTION, config(runs, trace_confidential=shown))
    root, asked = ("system", "Be brief."), ("human", "What does Ann have?")

    def masked(kind: str, words: str) -> tuple[str, str]:
        return kind, words if shown else MASK

    assert runs.read("ann") == [root, masked("system", "You plan."), asked, masked("human", "Which plan?")]
    assert runs.read("bob") == [root, ("system", "You are Bob."), asked, masked("ai", "Ann has three.")]
    assert runs.read("carl")[:2] == [root, masked("system", "You are Carl.")]
    assert runs.read("carl")[-1] == masked("human", "Now?")
    # No field of a message tells it either.
    told = repr([run["messages"] for run in runs.started.values()])
    assert [secret in told for secret in SECRETS] == [shown] * len(SECRETS)


def test_what_a_confidential_agent_calls_and_is_told_by_tools_is_masked() -> None:
    def find(what: str) -> str:
        """Look for it."""
        return f"A secret {what}."

    lines = {"ann": ['<tool_call>{"name": "find", "arguments": {"what": "kite"}}</tool_call>', "I know."] * 2}
    graph = ChoreoGraph(visibility="shared").add_node(Agent("ann", tools=[find], confidential=True))
    graph.add_node("tools", ToolNode([find])).add_node(Agent("bob")).set_visibility("ann", "bob").add_edge(START, "ann")
    graph.add_conditional_edges("ann", tools_condition, {"tools": "tools", END: "bob"}).add_edge("tools", "ann")
    with Script(lines, default="Well.").load() as engine:
        for shown in (False, True):
            runs = Runs()
            graph.compile(engine=engine).invoke(QUESTION, config(runs, trace_confidential=shown))
            assert [kind for kind, _ in runs.read("bob")] == ["human", "ai", "tool", "ai"]
            told = repr([run["messages"] for run in runs.started.values()])
            assert ("kite" in told) is ("I know." in told) is shown


def look(thing: str) -> str:
    """Look for Bob's boats."""
    return thing


@pytest.mark.parametrize("shown", [False, True])
def test_tools_are_told_beside_the_messages_and_masked_with_what_their_agent_is_told(shown: bool) -> None:
    runs = Runs()
    agents = [
        Agent("ann", tools=[look]),
        Agent("bob", tools=[look, {"name": "hide", "description": "Hide it."}], confidential=True),
        Agent("carl", tools=[look], system="You are Carl."),
        Agent("dora", tools=[look], tool_choice="none"),
    ]
    graph = chain(*agents, policy=Policy(confidential={"carl.system": frozenset({"ann", "bob", "dora"})}))
    with Script(default="Well.").load() as engine:
        graph.compile(engine=engine).invoke(QUESTION, config(runs, trace_confidential=shown))
    told = {run["name"]: run["invocation_params"].get("tools") for run in runs.started.values()}
    assert told["ann"] == [convert_to_openai_tool(look)] and told["dora"] is None
    names = {name: [each["function"]["name"] for each in told[name]] for name in ("bob", "carl")}
    assert names == ({"bob": ["look", "hide"], "carl": ["look"]} if shown else {"bob": [MASK, MASK], "carl": [MASK]})
    secret = repr([runs.started[run] for run in runs.started if runs.started[run]["name"] in ("bob", "carl")])
    assert ("Bob's boats" in secret, "Hide it." in secret) == (shown, shown)


def test_a_message_that_calls_says_so_and_one_that_is_cut_is_cut() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"thing": "boats"}}\n</tool_call>'
    reasons: list[tuple[str, int]] = []
    for said, most in ((call, 99), (f"{call} and so on and on and on", 42), ("<tool_call>{</tool_call>", 99)):
        runs = Runs()
        with Script({"ann": said}).load() as engine:
            app = chain(Agent("ann", tools=[look], sampling=Sampling(max_tokens=most))).compile(engine=engine)
            message = app.invoke(QUESTION, config(runs))["messages"][-1]
        runs.check()
        reasons.append((message.response_metadata["finish_reason"], len(message.tool_calls)))
    assert reasons == [("tool_calls", 1), ("length", 1), ("stop", 0)]


def test_clients_cannot_ask_for_it(scripted: Engine) -> None:
    app = chain(Agent("ann")).compile(engine=scripted)
    with pytest.raises(InvalidRequestError, match="trace_confidential"):
        app.invoke(QUESTION, {"configurable": {"trace_confidential": True}})


def test_a_prompt_of_a_schema_is_shown_in_words_its_confidential_modules_masked(scripted: Engine) -> None:
    schema = Schema.from_text(
        '<schema name="trip">You plan. <module name="rules">Go by <parameter name="how" length="4"/>.</module>'
        '<module name="money" confidential="true">Spend 900.</module></schema>'
    )
    prompt = schema.prompt('<rules how="bus"/><money/><system>Be quick.</system>')
    for shown in (False, True):
        runs = Runs()
        chain(Agent("ann", prompt=prompt), system=None).compile(engine=scripted).invoke(
            QUESTION, config(runs, trace_confidential=shown)
        )
        told = [words for kind, words in runs.read("ann") if kind == "system"]
        assert told[0] == "You plan." and "bus" in " ".join(told) and "Be quick." in " ".join(told)
        assert ("Spend 900." in " ".join(told)) is shown and (MASK in told) is not shown


def test_what_stands_in_for_messages_is_shown_as_it_is_read(scripted: Engine) -> None:
    """Re-worded, said shorter for a synthesizer, and told in place of what is not kept."""
    script = Script({"ann": ["Ann has three.", "Three."], "bob": ["Bob has two.", "Two."], "editor": "Five."})
    with script.load() as engine:
        runs, graph = Runs(), ChoreoGraph()
        for name in ("ann", "bob"):
            graph.add_node(Agent(name)).add_edge(START, name).add_edge(name, "editor", visibility={})
        graph.add_node(Synthesizer("editor", merges=["ann", "bob"], strategy="summary"))
        graph.compile(engine=engine).invoke(QUESTION, config(runs))
        assert runs.read("editor")[1:] == [("ai", "Three."), ("ai", "Two.")]


def test_what_runs_are_called_and_by_which_model_and_sampling(scripted: Engine) -> None:
    runs = Runs()
    sampling = Sampling(temperature=0.7, max_tokens=9, top_p=0.9, seed=5, stop=("END",))
    app = chain(Agent("ann", sampling=sampling, metadata={"team": "red"}), Agent("bob")).compile(engine=scripted)
    app.invoke(QUESTION, config(runs))
    ann, bob = runs.started.values()
    assert [ann["name"], bob["name"]] == ["ann", "bob"]
    model = scripted.model.name
    told = {name: value for name, value in ann["metadata"].items() if name.startswith("ls_")}
    assert told == {
        "ls_integration": "langgraph",
        "ls_provider": "choreo",
        "ls_model_name": model,
        "ls_model_type": "chat",
        "ls_temperature": 0.7,
        "ls_max_tokens": 9,
        "ls_stop": ["END"],
    }
    assert ann["metadata"]["team"] == "red" and ann["metadata"]["langgraph_node"] == "ann"
    asked = {"model": model, "temperature": 0.7, "top_p": 0.9, "max_tokens": 9, "seed": 5, "stop": ["END"]}
    assert asked.items() <= ann["invocation_params"].items()
    assert "ls_stop" not in bob["metadata"] and bob["metadata"]["ls_max_tokens"] == Sampling().max_tokens


def test_a_temperature_is_the_checkpoints_where_nobody_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_tiny_llama(tmp_path_factory.mktemp("warm"))
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    with Engine.load(folder, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        runs = Runs()
        chain(Agent("ann", sampling=Sampling(max_tokens=2))).compile(engine=engine).invoke(QUESTION, config(runs))
        [run] = runs.started.values()
        assert run["metadata"]["ls_temperature"] == 0.6 == run["invocation_params"]["temperature"]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(), "stop"),
        (Sampling(max_tokens=2), "length"),
        (Sampling(stop=("has",)), "stop"),
        (Sampling(max_tokens=2, stop=("has",)), "stop"),
        (Sampling(max_tokens=2, choices=("Ann has three.",)), ""),
        (Sampling(choices=("Ann has three.", "No.")), "stop"),
    ],
)
def test_a_cut_message_is_seen_to_be_cut(scripted: Engine, sampling: Sampling, reason: str) -> None:
    runs, app = Runs(), chain(Agent("ann", sampling=sampling)).compile(engine=scripted)
    if not reason:
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            app.invoke(QUESTION, config(runs))
        return runs.check()
    [*_, message] = app.invoke(QUESTION, config(runs))["messages"]
    assert message.response_metadata["finish_reason"] == reason
    handle = next(entry["handle"] for entry in app.invoke(QUESTION)["handles"] if entry["author"] == "ann")
    assert handle and added(*runs.chunks.values()).response_metadata["finish_reason"] == reason
    return runs.check()


THINKERS = ["Qwen 3", "gpt-oss"]


@pytest.fixture(scope="module", params=THINKERS)
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder, tokenizer = tmp_path_factory.mktemp("thinker"), tokenizer_for(request.param)
    save_tiny_llama(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    model = load_model(folder, chat={"date": "2026-11-23"})
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        yield engine


def test_thoughts_are_pieces_of_their_own_and_tokens_of_their_own(thinker: Engine) -> None:
    runs = Runs()
    graph = chain(
        Agent("ann", thinking=6, sampling=Sampling(temperature=1.0, max_tokens=5, seed=2)),
        Agent("bob", thinking=False, sampling=Sampling(temperature=1.0, max_tokens=5, seed=2)),
    )
    graph.compile(engine=thinker).invoke(QUESTION, config(runs))
    runs.check()
    ann, bob = runs.ended.values()
    assert ann.usage_metadata is not None and bob.usage_metadata is not None
    assert ann.usage_metadata["output_token_details"]["reasoning"] >= 6
    assert "output_token_details" not in bob.usage_metadata
    assert {ann.response_metadata["finish_reason"], bob.response_metadata["finish_reason"]} <= {"stop", "length"}


def said_by_ann(engine: Engine, said: str, **options: Any) -> tuple[AIMessage, Runs]:
    """What becomes of just these words of a model."""
    runs, tokens = Runs(), tuple(engine.model.encode(said))
    replay = {("ann", 1, 0, 0): tokens}
    app = chain(Agent("ann", **options)).compile(engine=engine)
    [*_, message] = app.invoke(QUESTION, config(runs, replay=replay))["messages"]
    runs.check()
    return message, runs


def test_pieces_add_up_whatever_stands_around_words_and_thoughts(thinker: Engine) -> None:
    chat = thinker.chat
    assert chat.thoughts is not None
    thoughts, words = "\n\n It is so,\n\nor 12 € <no? ", f"  The  end.\n\n\nNo 🙂: 7{chat.turn_end[:-1]} \n \n"
    message, _ = said_by_ann(thinker, thoughts + chat.thoughts.close + words, thinking=60)
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
    assert message.text.startswith("The  end.\n\n\nNo 🙂: 7") and message.text == message.text.strip()
    for said in (words, "\n \n", "", f"So.{chat.turn_end}"):
        message, _ = said_by_ann(thinker, said, thinking=False)
        assert isinstance(message.content, str)
    assert message.text == "So." and message.response_metadata["finish_reason"] == "stop"


def test_the_answer_is_cut_and_not_the_thoughts(thinker: Engine) -> None:
    assert thinker.chat.thoughts is not None
    runs, sampling = Runs(), Sampling(temperature=1.0, max_tokens=4, stop_tokens=())
    graph = chain(Agent("ann", thinking=7, sampling=sampling)).compile(engine=thinker)
    state = graph.invoke(QUESTION, config(runs))
    [message] = runs.ended.values()
    assert message.response_metadata["finish_reason"] == "length"
    words, close = "No" + thinker.chat.turn_end, thinker.chat.thoughts.close
    for said, reason in (("Hm, so" + close + words, "stop"), ("Hm" + close + "one two three four five", "length")):
        message, _ = said_by_ann(thinker, said, thinking=7, sampling=Sampling(max_tokens=5))
        assert message.response_metadata["finish_reason"] == reason
    assert state["messages"][-1].id


def test_a_character_that_is_never_completed_is_in_the_pieces_too(engine: Engine) -> None:
    for seed in range(2):
        runs = Runs()
        sampling = Sampling(temperature=2.0, max_tokens=20, seed=seed)
        chain(Agent("ann", sampling=sampling)).compile(engine=engine).invoke(QUESTION, config(runs))
        runs.check()


@pytest.mark.parametrize("sync", [True, False])
def test_a_stream_of_messages_adds_up_to_the_state(scripted: Engine, sync: bool) -> None:
    app = chain(Agent("ann"), Agent("bob")).compile(engine=scripted)
    modes = ["messages", "values"]

    async def parts() -> list[Any]:
        return [part async for part in app.astream(QUESTION, stream_mode=modes)]

    found = list(app.stream(QUESTION, stream_mode=modes)) if sync else asyncio.run(parts())
    state = [part for mode, part in found if mode == "values"][-1]
    pieces: dict[str, list[AIMessageChunk]] = {}
    for mode, part in found:
        if mode == "messages":
            assert isinstance(part[0], AIMessageChunk), "whole messages are not told again"
            pieces.setdefault(str(part[0].id), []).append(part[0])
    assert list(pieces) == [message.id for message in state["messages"][1:]]
    for message in state["messages"][1:]:
        assert_same(added(pieces[message.id]), message)


async def test_events_of_the_second_version_tell_the_same(scripted: Engine) -> None:
    app = chain(Agent("ann"), Agent("bob")).compile(engine=scripted)
    told: dict[str, list[Any]] = {}
    async for event in app.astream_events(QUESTION, version="v2"):
        if event["event"].startswith("on_chat_model"):
            told.setdefault(event["run_id"], []).append(event)
    assert [events[0]["name"] for events in told.values()] == ["ann", "bob"]
    for start, *stream, end in told.values():
        assert (start["event"], end["event"]) == ("on_chat_model_start", "on_chat_model_end")
        assert {event["event"] for event in stream} == {"on_chat_model_stream"}
        assert start["metadata"]["ls_model_name"] == scripted.model.name
        assert_same(added([event["data"]["chunk"] for event in stream]), end["data"]["output"])


def test_cached_tokens_are_among_those_of_the_input(scripted: Engine) -> None:
    runs = Runs()
    chain(Agent("ann"), Agent("bob")).compile(engine=scripted).invoke(QUESTION, config(runs))
    for message in runs.ended.values():
        usage = message.usage_metadata
        assert usage is not None and 0 <= usage["input_token_details"]["cache_read"] <= usage["input_tokens"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    bob = list(runs.ended.values())[-1].usage_metadata
    assert bob is not None and bob["input_token_details"]["cache_read"] > 0


def test_several_messages_at_a_time_are_several_runs(scripted: Engine) -> None:
    runs = Runs()
    worker = Worker("team", n=3, prompt="Guess.")
    state = chain(worker, Agent("bob")).compile(engine=scripted).invoke(QUESTION, config(runs))
    runs.check()
    assert [run["name"] for run in runs.started.values()] == ["team"] * 3 + ["bob"]
    assert {message.id for message in runs.ended.values()} == {message.id for message in state["messages"][1:]}


def test_two_models_are_two_names(scripted: Engine, engine: Engine) -> None:
    runs = Runs()
    graph = chain(Agent("ann", engine="one"), Agent("dan", engine="two", sampling=Sampling(max_tokens=3)))
    graph.compile(engine={"one": scripted, "two": engine}).invoke(QUESTION, config(runs))
    names = [run["metadata"]["ls_model_name"] for run in runs.started.values()]
    assert names == [scripted.model.name, engine.model.name] and names[0] != names[1]
    assert [each.response_metadata["model_name"] for each in runs.ended.values()] == names
    runs.check()


async def test_a_node_that_runs_again_tells_what_it_said_again(scripted: Engine) -> None:
    class Asking(ChoreoState):
        pass

    inner = Agent("bob", engine=scripted)

    async def asking(state: Asking, config: RunnableConfig) -> dict[str, Any]:
        said = await inner.ainvoke(state, config)
        interrupt("go on?")
        return said

    graph = ChoreoGraph(Asking)
    graph.add_node("bob", asking).add_edge(START, "bob")
    runs, app = Runs(), graph.compile(InMemorySaver())
    thread = {"callbacks": [runs], "configurable": {"thread_id": "t"}}
    await app.ainvoke(QUESTION, thread)  # type: ignore[call-overload]
    state = await app.ainvoke(Command(resume="yes"), thread)  # type: ignore[call-overload]
    one, other = runs.ended.values()
    assert one.text == other.text == state["messages"][-1].text == "Two, I think." and one.id == other.id
    assert other.response_metadata["finish_reason"] == "stop"
    runs.check()


class Refusing(Runs):
    """Fails at the second piece of what it is told."""

    def on_llm_new_token(self, token: str, *, chunk: Any = None, run_id: Any, **_: Any) -> None:
        super().on_llm_new_token(token, chunk=chunk, run_id=run_id)
        if len(self.chunks[run_id]) == 2:
            raise ArithmeticError


@pytest.mark.parametrize("n", [1, 3])
def test_what_fails_while_it_is_told_ends_every_run(scripted: Engine, n: int) -> None:
    runs = Refusing()
    with pytest.raises(ArithmeticError):
        chain(Worker("team", n=n, prompt="Guess.", speaker="ann")).compile(engine=scripted).invoke(
            QUESTION, config(runs)
        )
    assert runs.over == runs.started.keys() and len(runs.started) == n
    assert any(isinstance(error, ArithmeticError) for error in runs.failed.values())


@pytest.mark.parametrize("sync", [True, False])
def test_callbacks_that_fail_fail_no_run(scripted: Engine, sync: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(BaseCallbackHandler):
        def fails(self, *_: Any, **__: Any) -> None:
            raise ValueError("no room in the log")

        on_chat_model_start = on_llm_new_token = on_llm_end = on_llm_error = fails

    runs, failing = Runs(), Failing()
    app = chain(Agent("ann"), Agent("bob")).compile(engine=scripted)
    given: Any = [QUESTION, {"callbacks": [failing, runs]}]
    state = app.invoke(*given) if sync else asyncio.run(app.ainvoke(*given))
    assert [message.text for message in state["messages"][1:]] == ["Ann has three.", "Two, I think."]
    assert "no room in the log" in caplog.text
    runs.check()


def test_what_is_refused_ends_its_run(scripted: Engine) -> None:
    """Before anything is decoded: nothing is said, or it cannot be."""
    runs = Runs()
    with Script({}).load() as silent, pytest.raises(ScriptError):
        chain(Agent("ann")).compile(engine=silent).invoke(QUESTION, config(runs))
    with pytest.raises(AdapterError):
        chain(Agent("ann", adapter="none")).compile(engine=scripted).invoke(QUESTION, config(runs))
    assert len(runs.started) == 2 and runs.failed.keys() == runs.started.keys()


def test_what_fails_behind_the_last_token_ends_its_run(scripted: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    app = chain(Agent("ann")).compile(engine=scripted)
    monkeypatch.setattr(type(scripted.inspect), "finish_reason", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        app.invoke(QUESTION, config(runs))
    assert runs.failed.keys() == runs.started.keys() and len(runs.started) == 1


class Slow(Runs):
    """Takes its time with what it is told: longer than whoever cancels waits."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.begun = at, threading.Event()

    def _slowly(self, at: str) -> None:
        if at == self.at:
            self.begun.set()
            time.sleep(0.05)

    def on_chat_model_start(self, *told: Any, **named: Any) -> None:
        self._slowly("start")
        super().on_chat_model_start(*told, **named)

    def on_llm_end(self, *told: Any, **named: Any) -> None:
        self._slowly("end")
        super().on_llm_end(*told, **named)


@pytest.mark.parametrize("at", ["start", "end"])
def test_a_run_that_is_cancelled_while_it_is_told_of_ends(scripted: Engine, at: str) -> None:
    runs = Slow(at)
    app = chain(Agent("ann")).compile(engine=scripted)

    async def cancelled() -> None:
        task = asyncio.create_task(app.ainvoke(QUESTION, config(runs)))
        await asyncio.to_thread(runs.begun.wait, 20)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert len(runs.started) == 1 and (runs.failed if at == "start" else runs.ended).keys() == runs.started.keys()


async def test_cancelled_runs_end(engine: Engine) -> None:
    runs, begun = Runs(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch(*_: Any) -> Any:
        return lambda _: loop.call_soon_threadsafe(begun.set)

    app = chain(Worker("team", n=2, sampling=Sampling(max_tokens=180, stop_tokens=()))).compile(engine=engine)
    task = asyncio.create_task(app.ainvoke(QUESTION, config(runs, logits_callback=watch)))
    await asyncio.wait_for(begun.wait(), 20)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert len(runs.started) == 2 and runs.failed.keys() == runs.started.keys()
    assert all(isinstance(error, asyncio.CancelledError) for error in runs.failed.values())


def test_a_token_costs_the_same_at_the_end_of_a_long_message(record_property: Any) -> None:
    """Counted: tokens that are decoded to text, characters that callbacks are given, chunks."""

    def costs(words: int) -> tuple[int, int, int]:
        runs, said = Runs(), " ".join(f"word{at:03}" for at in range(words))
        with Script({"ann": said}).load() as engine:
            decoded, decode = 0, type(engine.model).decode

            def counting(self: Any, tokens: Any, **options: Any) -> str:
                nonlocal decoded
                decoded += len(tokens)
                return decode(self, tokens, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(engine.model), "decode", counting)
                app = chain(Agent("ann", sampling=Sampling(max_tokens=2000))).compile(engine=engine)
                [*_, message] = app.invoke(QUESTION, config(runs))["messages"]
        assert message.text == said
        [chunks] = runs.chunks.values()
        return decoded, sum(len(str(chunk.text)) for chunk in chunks), len(chunks)

    small, middle, large = costs(20), costs(60), costs(100)
    record_property("counts", f"20, 60 and 100 words: {small}, {middle}, {large}")
    for one, two, three in zip(small, middle, large, strict=True):
        assert abs((three - two) - (two - one)) <= 12, "as much for the last forty words as for those before"


def spans_of(exporter: Any, kind: str, name: str) -> list[dict[str, Any]]:
    return [dict(span.attributes) for span in exporter.get_finished_spans() if span.attributes.get(kind) == name]


def traced(engine: Engine, instrumentor: Any, **options: Any) -> Any:
    """The spans of a run of two agents, in memory."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor.instrument(tracer_provider=provider, **options)
    try:
        ann = Agent("ann", system="You plan.", sampling=Sampling(temperature=0.5, max_tokens=2, seed=1))
        secret = Agent("bob", system="You are Bob.", prompt="Which?", confidential=True)
        app = chain(ann, secret, Agent("carl")).set_visibility("bob", "carl").compile(engine=engine)
        state = app.invoke(QUESTION)
    finally:
        instrumentor.uninstrument()
    return exporter, [message for message in state["messages"] if isinstance(message, AIMessage)]


def test_openinference_has_model_tokens_and_conversation(scripted: Engine) -> None:
    module = pytest.importorskip("openinference.instrumentation.langchain")
    exporter, said = traced(scripted, module.LangChainInstrumentor())
    spans = spans_of(exporter, "openinference.span.kind", "LLM")
    assert len(spans) == len(said) == 3
    for span, message in zip(spans, said, strict=True):
        usage = message.usage_metadata
        assert usage is not None and span["llm.model_name"] == scripted.model.name and span["llm.provider"] == "choreo"
        assert span["llm.token_count.prompt"] == usage["input_tokens"]
        assert span["llm.token_count.completion"] == usage["output_tokens"]
        cached = usage["input_token_details"]["cache_read"]
        assert span.get("llm.token_count.prompt_details.cache_read", 0) == cached <= usage["input_tokens"]
        assert span["llm.output_messages.0.message.content"] == message.text
        assert span["llm.finish_reason"] == message.response_metadata["finish_reason"]
    told = [value for name, value in spans[0].items() if name.startswith("llm.input_messages") and "content" in name]
    assert told == ["Be brief.", "You plan.", "What does Ann have?"]
    assert spans[0]["llm.finish_reason"] == "length" and '"temperature": 0.5' in spans[0]["llm.invocation_parameters"]
    assert MASK in spans[1].values() and "Which?" not in repr(spans[1]) and MASK in spans[2].values()
    others = spans_of(exporter, "openinference.span.kind", "CHAIN") + spans_of(
        exporter, "openinference.span.kind", "AGENT"
    )
    assert others and not [name for span in others for name in span if name.startswith("llm.token_count")]


def test_openllmetry_has_model_tokens_and_conversation(scripted: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("opentelemetry.instrumentation.langchain")
    resolve_path, wrap = pytest.importorskip("wrapt").resolve_path, module.wrap_function_wrapper
    with monkeypatch.context() as patch:

        def wrapped_for_now(target: str, name: str, wrapper: Any) -> Any:
            """What it wraps it leaves so, and then logs warnings of runs that other tests have."""
            patch.setattr(*resolve_path(target, name))
            return wrap(target, name, wrapper)

        patch.setattr(module, "wrap_function_wrapper", wrapped_for_now)
        exporter, said = traced(scripted, module.LangchainInstrumentor())
    assert not hasattr(BaseCallbackManager.__init__, "__wrapped__")
    spans = spans_of(exporter, "gen_ai.operation.name", "chat")
    assert len(spans) == len(said) == 3
    for span, message in zip(spans, said, strict=True):
        usage = message.usage_metadata
        assert usage is not None
        assert span["gen_ai.request.model"] == span["gen_ai.response.model"] == scripted.model.name
        assert span["gen_ai.usage.input_tokens"] == usage["input_tokens"]
        assert span["gen_ai.usage.output_tokens"] == usage["output_tokens"]
        assert span["gen_ai.usage.cache_read.input_tokens"] == usage["input_token_details"]["cache_read"]
        assert span["gen_ai.response.finish_reasons"] == (message.response_metadata["finish_reason"],)
        assert message.text in span["gen_ai.output.messages"]
    assert (spans[0]["gen_ai.request.temperature"], spans[0]["gen_ai.request.max_tokens"]) == (0.5, 2)
    assert "You plan." in spans[0]["gen_ai.system_instructions"] and "Ann have" in spans[0]["gen_ai.input.messages"]
    assert MASK in spans[1]["gen_ai.system_instructions"] and MASK in spans[2]["gen_ai.input.messages"]
    others = [s for s in exporter.get_finished_spans() if s.attributes.get("gen_ai.operation.name") != "chat"]
    assert others and not [name for span in others for name in span.attributes if name.startswith("gen_ai.usage")]
