"""Answers of `ChatChoreo` that others read: in graphs, where their references are proven, and merged by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_choreo import ChatChoreo
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from pydantic import BaseModel
from support.chat_scripts import JOKE, family_script
from support.chatty import save_chatty

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Engine, Memory, MessageHandle, Synthesizer
from choreo_agents.errors import LineageWarning, ProvenanceWarning
from choreo_agents.models import LoadedModel, load_model

RULES = "Work in parts, and leave nothing out of them."
ASKED = {"Alice": "Write part 1.", "Bruno": "Write part 2.", "Clara": "Write part 3."}
MERGE = "Write all parts again."
PARTS = (
    "Ann with red kites, Bob with blue boats",
    "Cleo with green drums, Dan with gold rings",
    "Eve with white cups, Finn with black hats",
)
PROBLEM = f"Write about {', '.join(PARTS)} in parts of 2."
Edit = Callable[[AIMessage], Any]


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return "It's sunny."


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load_model("embedded")


@pytest.fixture
def engine(embedded: LoadedModel) -> Iterator[Engine]:
    with Engine.load(embedded) as engine:
        yield engine
        engine.check()


def asking(chat: Any, asked: str, edit: Edit = lambda answer: answer) -> Any:
    """The usual node: a function that calls a chat model with the state's messages."""

    def speak(state: Any) -> Any:
        told = [SystemMessage(RULES), *state["messages"], HumanMessage(asked)]
        return {"messages": [edit(chat.invoke(told))]}

    return speak


def fan(graph: Any, nodes: dict[str, Any], merger: Any) -> Any:
    for name, node in nodes.items():
        graph.add_node(name, node).add_edge(START, name)
    graph.add_node("David", merger)
    return graph.add_edge(list(nodes), "David").add_edge("David", END)


def swapped(engine: Engine, kind: str, chat: Any = None, edit: Edit = lambda answer: answer) -> Any:
    """A graph whose branches are functions or agents, and only its synthesizer surely ours."""
    functions = {name: asking(chat or ChatChoreo(engine=engine), asked, edit) for name, asked in ASKED.items()}
    if kind == "stock":
        merger = Synthesizer("David", engine=engine, shared_system=RULES, merges=list(ASKED), prompt=MERGE)
        return fan(StateGraph(ChoreoState), functions, merger)
    agents = {name: Agent(name, prompt=asked) for name, asked in ASKED.items()}
    nodes: Any = agents if kind == "agents" else functions
    return fan(ChoreoGraph(system=RULES), nodes, Synthesizer("David", merges=list(ASKED), prompt=MERGE))


def compiled(graph: Any, engine: Engine, saver: Any = None) -> Any:
    return graph.compile(saver, engine=engine) if isinstance(graph, ChoreoGraph) else graph.compile(saver)


def cost_of(app: Any, node: str = "David", given: Any = None, **options: Any) -> tuple[int, int]:
    """Tokens that a node's call encoded, and reused."""
    given = {"messages": [("user", PROBLEM)]} if given is None else given
    parts = app.stream(given, stream_mode="custom", **options)
    [told] = [part for part in parts if part["type"] == "choreo.decode" and part["agent"] == node]
    return told["tokens_encoded"], told["tokens_reused"]


@pytest.mark.parametrize("kind", ["choreo", "stock", "agents"])
def test_a_synthesizer_reads_the_caches_of_its_branches(engine: Engine, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoded, reused = cost_of(compiled(swapped(engine, kind), engine))
    assert encoded <= 60 and reused >= 110


@pytest.mark.parametrize("kind", ["choreo", "stock"])
@pytest.mark.parametrize("streamed", ["by the function", "by the graph"])
def test_an_answer_that_was_streamed_is_one_too(engine: Engine, kind: str, streamed: str) -> None:
    class Streamed(ChatChoreo):
        def invoke(self, *args: Any, **more: Any) -> Any:
            pieces = list(self.stream(*args, **more))
            return sum(pieces[1:], start=pieces[0])

    by_function = streamed == "by the function"
    app = compiled(swapped(engine, kind, Streamed(engine=engine) if by_function else None), engine)
    parts = list(app.stream({"messages": [("user", PROBLEM)]}, stream_mode=["custom", "messages"]))
    [told] = [part for mode, part in parts if mode == "custom" and part.get("agent") == "David"]
    assert told["tokens_encoded"] <= 60
    assert sum(mode == "messages" for mode, _ in parts) > 10, "it came in pieces"


async def test_on_an_event_loop_and_with_a_checkpointer(engine: Engine) -> None:
    chat = ChatChoreo(engine=engine)

    def node(asked: str) -> Any:
        async def speak(state: Any) -> Any:
            return {"messages": await chat.ainvoke([SystemMessage(RULES), *state["messages"], HumanMessage(asked)])}

        return speak

    merger = Synthesizer("David", merges=list(ASKED), prompt=MERGE)
    graph = fan(ChoreoGraph(system=RULES), {name: node(asked) for name, asked in ASKED.items()}, merger)
    app, config = graph.compile(InMemorySaver(), engine=engine), {"configurable": {"thread_id": "t"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = await app.ainvoke({"messages": [("user", PROBLEM)]}, config)
        first = engine.stats().tokens_encoded
        await app.ainvoke({"messages": [("user", "Again.")]}, config)
    authors = [entry["author"] for entry in state["handles"] if entry.get("answered")]
    assert sorted(authors) == sorted([*ASKED, "David"]), "each is its node's, as it was encoded, and who read them"
    assert first and engine.stats().leases > 0
    app.delete_thread("t")
    assert engine.stats().leases == 0, "the thread had the lease"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_chatty(tmp_path_factory.mktemp("chatty"), layers=2))


def test_the_merge_says_what_it_says_of_agents(chatty: LoadedModel) -> None:
    """Token by token: functions and agents that are asked the same answer the same, and are merged to the same."""
    said: list[list[list[int]]] = []
    for kind in ("functions", "agents"):
        with Engine.load(chatty, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
            chat = ChatChoreo(engine=engine, temperature=0.0, max_tokens=12)
            sampling: Any = {"temperature": 0.0, "max_tokens": 12}
            nodes: dict[str, Any] = {
                name: asking(chat, asked)
                if kind == "functions"
                else Agent(name, prompt=asked, assistant_prefix="", sampling=sampling)
                for name, asked in ASKED.items()
            }
            merger = Synthesizer("David", merges=list(ASKED), prompt=MERGE, sampling=sampling)
            app = fan(ChoreoGraph(system=RULES), nodes, merger).compile(engine=engine)
            entries = app.invoke({"messages": [("user", PROBLEM)]})["handles"]
            spoken = [entry for entry in entries if entry["author"] in (*ASKED, "David")]
            said.append([engine.tokens(MessageHandle.model_validate(entry["handle"])) for entry in spoken])
    assert len(said[0]) == 4 and said[0] == said[1]
    assert len(set(map(tuple, said[0][:3]))) == 3, "branches say different things"


# References that are of no use


def forged(answer: AIMessage) -> AIMessage:
    return AIMessage("Ann has gold rings.", id="forged", response_metadata=answer.response_metadata)


def edited(answer: AIMessage) -> AIMessage:
    return answer.model_copy(update={"content": "Ann has gold rings."})


def renamed(answer: AIMessage) -> AIMessage:
    note = answer.response_metadata["choreo"]
    return answer.model_copy(
        update={"response_metadata": {"choreo": {**note, "author": "David", "confidential": True}}}
    )


def bare(answer: AIMessage) -> AIMessage:
    return AIMessage(answer.text)


@pytest.mark.parametrize("kind", ["choreo", "stock"])
@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (forged, "edited|signature|not an answer of"),
        (edited, "edited|signature"),
        (renamed, "not an answer of|signature"),
        (bare, "not an answer of"),
    ],
)
def test_attack_a_reference_that_was_changed_gives_words(engine: Engine, kind: str, edit: Edit, why: str) -> None:
    app = compiled(swapped(engine, kind, edit=edit), engine)
    with pytest.warns((LineageWarning, ProvenanceWarning)) as told:
        state = app.invoke({"messages": [("user", PROBLEM)]})
    assert not any(entry.get("answered") for entry in state["handles"])
    words = " ".join(str(each.message) for each in told if each.category is LineageWarning)
    assert any(part in words for part in why.split("|")) and "'David' reads" in words


@pytest.mark.parametrize("kind", ["choreo", "stock"])
@pytest.mark.parametrize("whose", ["another engine's", "another tenant's"])
def test_attack_a_reference_of_others_gives_words(engine: Engine, embedded: LoadedModel, kind: str, whose: str) -> None:
    with Engine.load(embedded) as other:
        chat = ChatChoreo(engine=other) if whose == "another engine's" else ChatChoreo(engine=engine, tenant="a salt")
        app = compiled(swapped(engine, kind, chat), engine)
        with pytest.warns(LineageWarning, match="another engine or tenant made it|its signature is"):
            encoded, _ = cost_of(app)
    assert encoded > 90


@pytest.mark.parametrize("kind", ["choreo", "stock"])
def test_a_reference_to_what_was_forgotten_gives_words(engine: Engine, kind: str) -> None:
    graph, config = swapped(engine, kind), {"configurable": {"thread_id": "t"}}
    app = (
        graph.compile(InMemorySaver(), engine=engine, interrupt_before=["David"])
        if kind == "choreo"
        else graph.compile(InMemorySaver(), interrupt_before=["David"])
    )
    app.invoke({"messages": [("user", PROBLEM)]}, config)
    engine.threads.forget("t")
    with pytest.warns(LineageWarning, match="it was deleted"):
        state = app.invoke(None, config)
    assert state["messages"][-1].text and not any(entry.get("answered") for entry in state["handles"])


@pytest.mark.parametrize("kind", ["choreo", "stock"])
def test_attack_a_client_brings_an_answer_of_another_thread(engine: Engine, kind: str) -> None:
    app = compiled(swapped(engine, kind), engine, InMemorySaver())
    asked: Any = {"messages": [("user", PROBLEM)]}
    secret = app.invoke(asked, {"configurable": {"thread_id": "t"}})["messages"][1]
    assert secret.response_metadata["choreo"]["handle"]
    with pytest.warns(ProvenanceWarning):
        state = app.invoke({"messages": [secret]}, {"configurable": {"thread_id": "u"}})
    [entry] = [entry for entry in state["handles"] if entry["message_id"] == secret.id]
    assert entry["author"] == START and entry["handle"]["id"] != secret.response_metadata["choreo"]["handle"]


def test_what_it_reads_in_words_is_told(engine: Engine) -> None:
    app = compiled(swapped(engine, "choreo", edit=bare), engine)
    with pytest.warns(LineageWarning, match="'Alice' .it is not an answer of a ChatChoreo"):
        cost_of(app)
    told_to = Synthesizer("David", merges=list(ASKED), strategy="text")
    nodes = {name: asking(ChatChoreo(engine=engine), asked, bare) for name, asked in ASKED.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost_of(fan(ChoreoGraph(system=RULES), nodes, told_to).compile(engine=engine))


# Merged by hand


def test_answers_are_merged_without_a_graph(engine: Engine) -> None:
    chat = ChatChoreo(engine=engine)
    answers = chat.batch([[SystemMessage(RULES), HumanMessage(f"{PROBLEM} {asked}")] for asked in ASKED.values()])
    before = engine.stats()
    merged = chat.merge(answers, MERGE)
    after = engine.stats()
    read = sum(answer.response_metadata["choreo"]["length"] for answer in answers)
    assert after.tokens_reused - before.tokens_reused >= read > 50
    assert after.tokens_encoded - before.tokens_encoded < 20
    pieces = list(chat.stream(MERGE, merges=answers))
    assert len(pieces) > 2 and sum(pieces[1:], start=pieces[0]).text == merged.text != chat.invoke(MERGE).text
    again = chat.merge([merged, merged], [SystemMessage(RULES), HumanMessage(MERGE)])
    assert again.response_metadata["choreo"]["handle"], "what was merged is an answer itself"


async def test_and_on_an_event_loop_by_a_model_with_arguments(engine: Engine) -> None:
    chat = ChatChoreo(engine=engine)
    answers = await chat.abatch([f"{PROBLEM} {asked}" for asked in ASKED.values()])
    whole = await chat.amerge(answers, MERGE)
    short = await chat.bind(max_tokens=2).amerge(answers, MERGE)
    assert whole.text.startswith(short.text) and len(short.text) < len(whole.text)
    assert chat.bind(max_tokens=2).merge(answers, MERGE).text == short.text


@pytest.mark.parametrize("family", ["Qwen 3", "listed"])
def test_with_tools_and_structured_output(family: str) -> None:
    script = family_script(family)
    chat = ChatChoreo(engine=script.engine, thinking=False)
    answers = chat.batch(["Who are you?", "Who am I?"])
    merged = chat.bind_tools([get_weather]).merge(answers, "weather in San Francisco")
    assert [call["name"] for call in merged.tool_calls] == ["get_weather"]
    assert chat.with_structured_output(Joke).invoke("A joke about cats.", merges=answers) == Joke(**JOKE)


def test_what_cannot_be_merged_is_read_in_its_words(engine: Engine, embedded: LoadedModel) -> None:
    chat = ChatChoreo(engine=engine)
    answer = chat.invoke(PROBLEM)
    lost: list[tuple[BaseMessage, str]] = [
        (edited(answer), "edited"),
        (forged(answer), "signature|edited"),
        (renamed(answer), "signature is missing"),
        (HumanMessage("Hello."), "not an answer of a ChatChoreo"),
        (chat.invoke(PROBLEM, stop=[answer.text.split()[-1]]), "decode it without `stop`"),
        (chat.invoke(PROBLEM, {"configurable": {"thread_id": "t"}}), "signature is missing"),
        (ChatChoreo(engine=engine, tenant="a salt").invoke(PROBLEM), "thread and tenant that made it"),
    ]
    with Engine.load(embedded) as other:
        lost.append((ChatChoreo(engine=other).invoke(PROBLEM), "thread and tenant that made it"))
    for message, why in lost:
        before = engine.stats().tokens_encoded
        with pytest.warns(LineageWarning, match=why):
            assert chat.merge([message], MERGE).text
        assert engine.stats().tokens_encoded > before


def test_a_scope_keeps_what_is_answered_in_it(engine: Engine) -> None:
    chat = ChatChoreo(engine=engine, max_tokens=2)
    with chat.scope():
        answer = chat.invoke("Who has kites?")
        for number in range(70):  # more than are kept without one
            chat.invoke(f"Who has {number} kites?")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            chat.merge([answer], MERGE)
    with pytest.warns(LineageWarning, match="it was deleted"):
        chat.merge([answer], MERGE)
