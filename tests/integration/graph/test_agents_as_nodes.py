"""Agents as a LangGraph developer writes nodes: they route, write channels, and are told what functions make."""

from __future__ import annotations

import gc
import operator
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.graph.message import add_messages
from langgraph.runtime import Runtime
from langgraph.types import Command, Overwrite, RetryPolicy
from pydantic import BaseModel
from support.graphs import QUESTION, agent, speakers_of, words_seen
from typing_extensions import TypedDict

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    ChoreoState,
    Engine,
    HistoryLimit,
    Policy,
    Sampling,
    VisibilityMode,
    Worker,
)
from choreo_agents.errors import InvalidRequestError, VisibilityWarning
from choreo_agents.graph.state import merge_entries


class Report(ChoreoState):
    """A state with channels of its own."""

    plan: str
    words: Annotated[list[str], operator.add]


class Modelled(BaseModel):
    """The same as pydantic has it."""

    handles: Annotated[list[Any], merge_entries] = []
    messages: Annotated[list[Any], add_messages] = []
    plan: str = ""


@dataclass
class Data:
    handles: Annotated[list[Any], merge_entries] = field(default_factory=list)
    messages: Annotated[list[Any], add_messages] = field(default_factory=list)
    plan: str = ""


def seen_by(engine: Engine, state: dict[str, Any], author: str) -> list[tuple[str | None, str]]:
    return [seen for seen in speakers_of(engine, state, author) if seen[0] != "public root"]


def line(*agents: Agent, **options: Any) -> ChoreoGraph:
    """Agents one after the other, everyone seeing everyone."""
    graph = ChoreoGraph(Report, visibility="shared", **options)
    for one, other in zip((None, *agents), agents, strict=False):
        graph.add_node(other)
        graph.add_edge(START if one is None else one.name, other.name)
    return graph


def test_what_was_said_becomes_an_update_of_any_channel(engine: Engine) -> None:
    def note(said: AIMessage, state: Any) -> dict[str, Any]:
        assert state["messages"][-1] == said and state["handles"][-1]["message_id"] == said.id
        return {"plan": said.text.upper(), "words": [said.text]}

    async def count(said: AIMessage) -> dict[str, Any]:
        return {"words": [said.text]}

    state = line(agent("ann", on_output=note), agent("bob", on_output=count)).compile(engine=engine).invoke(QUESTION)
    ann, bob = (message.text for message in state["messages"][1:])
    assert state["plan"] == ann.upper() and state["words"] == [ann, bob]
    assert [entry["author"] for entry in state["handles"]] == [START, "ann", "bob"]


def test_what_a_state_works_out_of_its_messages_counts_what_was_said(engine: Engine) -> None:
    @dataclass
    class Counted(Data):
        count: int = field(init=False, default=0)

        def __post_init__(self) -> None:
            self.count = len(self.messages)

    graph = ChoreoGraph(Counted)
    graph.add_node(agent("ann", on_output=lambda said, state: {"plan": f"{state.count}"}))
    assert graph.add_edge(START, "ann").compile(engine=engine).invoke(QUESTION)["plan"] == "2"


def test_a_worker_that_nobody_holds_is_gone() -> None:
    gc.disable()
    try:
        worker = Worker("w", prompt="Write.")
        gone = weakref.ref(worker)
        del worker
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("stock", [False, True])
def test_an_agent_sends_control_where_it_says(engine: Engine, stock: bool) -> None:
    def route(said: AIMessage, state: Any) -> Command[Literal["bob", "__end__"]]:
        return Command(goto="bob" if len(state["messages"]) < 5 else END, update={"words": ["routed"]})

    graph: Any = StateGraph(Report) if stock else ChoreoGraph(Report, visibility="shared")
    options: Any = {"engine": engine, "reads": "*"} if stock else {}
    graph.add_node("ann", agent("ann", on_output=route, **options))
    graph.add_node("bob", agent("bob", **options))
    graph.add_edge(START, "ann")
    graph.add_edge("bob", "ann")
    app = graph.compile() if stock else graph.compile(engine=engine)
    state = app.invoke(QUESTION)
    assert [entry["author"] for entry in state["handles"]] == [START, "ann", "bob", "ann", "bob", "ann"]
    assert state["words"] == ["routed"] * 3
    assert [name for name, _ in seen_by(engine, state, "bob")] == [START, "ann", "bob", "ann"]
    if not stock:
        assert {("ann", "bob"), ("ann", END)} <= {(e.source, e.target) for e in app.get_graph().edges}
        assert any("on_output of 'ann'" in each for each in app.audit().outside)


def test_map_reduce_needs_no_node_between(engine: Engine) -> None:
    worker = Worker("worker", sampling=Sampling(max_tokens=4, stop_tokens=()))

    def plan(said: AIMessage, state: Any) -> Command[Literal["worker"]]:
        return Command(goto=[worker.send(state, f"Write part {number}.") for number in range(3)])

    graph = ChoreoGraph(visibility="shared")
    graph.add_node(agent("boss", on_output=plan))
    graph.add_node(worker)
    graph.add_node("join", agent("join"))
    graph.add_edge(START, "boss").add_edge("worker", "join")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert [entry["author"] for entry in state["handles"]] == [START, "boss", "worker", "worker", "worker", "join"]
    assert "boss" in [name for name, _ in seen_by(engine, state, "worker")]
    assert [name for name, _ in seen_by(engine, state, "join")] == [START, "boss", *["worker"] * 3]


def test_messages_of_an_update_are_the_nodes_own(engine: Engine) -> None:
    def more(said: AIMessage) -> dict[str, Any]:
        return {"messages": [HumanMessage("More words.", id="more")]}

    graph = line(agent("ann", on_output=more), agent("bob"))
    state = graph.compile(InMemorySaver(), engine=engine).invoke(QUESTION, {"configurable": {"thread_id": "1"}})
    assert [message.type for message in state["messages"]] == ["human", "ai", "human", "ai"]
    assert "More words." in words_seen(engine, state, "bob")


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda said: 3, "a dict of channels or a Command with one, not a int"),
        (lambda said: {"handles": []}, "handles"),
        (lambda said: Command(update=[("words", ["x"])]), "not a list"),
    ],
)
def test_what_is_no_update_is_refused(engine: Engine, made: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        line(agent("ann", on_output=made)).compile(engine=engine).invoke(QUESTION)


def test_prompts_and_systems_are_made_of_state_runtime_and_config(engine: Engine) -> None:
    def system(state: Any, config: RunnableConfig) -> SystemMessage:
        return SystemMessage(f"You serve {config['configurable']['who']}.")

    async def prompt(state: Any, runtime: Runtime[Any]) -> list[HumanMessage]:
        assert runtime.stream_writer is not None
        return [HumanMessage(f"Seen {len(state['messages'])}."), HumanMessage("Go on.")]

    graph = line(agent("ann", system=system, prompt=prompt), agent("bob", system=lambda state: None))
    app = graph.compile(engine=engine)
    state = app.invoke(QUESTION, {"configurable": {"who": "Zoe"}})
    seen = words_seen(engine, state, "ann")
    assert "You serve Zoe." in seen and "Seen 1.\n\nGo on." in seen
    assert state["handles"][1]["system_texts"] == ["You serve Zoe."] and "system_texts" not in state["handles"][2]
    # What it was told is its private context, as a fixed one is: bob has it through ann's message.
    assert ("ann.system", "encoding") in {
        (f.context, f.channel) for f in app.audit(state).findings if f.reader == "bob"
    }
    assert any("the system prompt of 'ann'" in each for each in app.audit().outside)


@pytest.mark.parametrize("what", ["system", "prompt"])
@pytest.mark.parametrize("words", [3, {"text": "x"}, [SystemMessage("x"), HumanMessage("y")], AIMessage("x"), Agent])
def test_what_is_no_words_is_refused_at_construction(what: str, words: Any) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        agent("ann", **{what: words})


def test_what_a_function_makes_is_refused_before_anything_is_encoded(engine: Engine) -> None:
    graph = line(agent("ann", prompt=lambda state: AIMessage("x")))
    before = engine.stats().tokens_encoded
    with pytest.raises(InvalidRequestError, match="others are in the graph's state"):
        graph.compile(engine=engine).invoke(QUESTION)
    assert engine.stats().tokens_encoded == before


@pytest.mark.parametrize("function", [lambda: "x", lambda state, other: "x", lambda state, *, what: "x"])
def test_a_function_that_cannot_be_called_is_refused_at_construction(function: Any) -> None:
    with pytest.raises(InvalidRequestError, match="with other parameters"):
        agent("ann", prompt=function)


def test_sampling_is_checked_at_construction() -> None:
    assert Agent("ann", sampling={"max_tokens": 3}).sampling == Sampling(max_tokens=3)  # type: ignore[arg-type]
    for wrong in ({"max_token": 3}, {"temperature": "hot"}, 0.7, Sampling(n=2)):
        with pytest.raises(InvalidRequestError, match="sampling"):
            Agent("ann", sampling=wrong)  # type: ignore[arg-type]


class Bare(TypedDict):
    question: str


class Unmerged(TypedDict):
    handles: list[Any]
    messages: Annotated[list[Any], operator.add]


@pytest.mark.parametrize(("schema", "match"), [(Bare, "no 'handles' and no 'messages'"), (Unmerged, "another reducer")])
def test_a_state_without_our_channels_is_refused_at_compile(engine: Engine, schema: Any, match: str) -> None:
    graph = ChoreoGraph(schema)
    graph.add_node(agent("ann"))
    graph.add_edge(START, "ann")
    with pytest.raises(InvalidRequestError, match=match):
        graph.compile(engine=engine)


def said_by_turns(engine: Engine, **options: Any) -> dict[str, Any]:
    graph = line(agent("ann"), agent("bob", system="Bob's notes.", **options))
    app = graph.compile(InMemorySaver(), engine=engine)
    for _ in range(3):
        state = app.invoke(QUESTION, {"configurable": {"thread_id": "1"}})
    return state


def test_a_history_bounds_an_agents_own_messages_too(engine: Engine) -> None:
    state = said_by_turns(engine, history=3)
    assert [name for name, _ in seen_by(engine, state, "bob")] == ["bob.system", "bob", START, "ann"]
    whole = said_by_turns(engine)
    assert len(seen_by(engine, whole, "bob")) == 9


def test_without_a_history_an_agent_knows_what_it_is_told_and_asked_alone(engine: Engine) -> None:
    """As a node that makes one prompt of the state: neither its own earlier words nor what it was asked before."""
    state = said_by_turns(engine, history=0, prompt=lambda state: f"{len(state['messages'])} messages.")
    seen = seen_by(engine, state, "bob")
    assert [name for name, _ in seen] == ["bob.system", "bob.system"] and "8 messages." in seen[1][1]


def test_a_history_keeps_as_many_as_its_tokens_allow(engine: Engine) -> None:
    state = said_by_turns(engine)
    lengths = [entry["handle"]["length"] for entry in state["handles"]][:-1]
    bound = sum(lengths[-4:])
    kept = said_by_turns(engine, history=HistoryLimit(tokens=bound))
    assert len(seen_by(engine, kept, "bob")) == 1 + 4
    assert len(seen_by(engine, said_by_turns(engine, history=HistoryLimit(tokens=bound - 1)), "bob")) == 1 + 3


def test_a_summary_stands_for_what_is_not_kept(engine: Engine) -> None:
    asked: list[list[str]] = []

    async def summary(messages: list[Any]) -> str:
        asked.append([message.type for message in messages])
        return f"Before that, {len(messages)} messages were said."

    state = said_by_turns(engine, history=HistoryLimit(last=2, summary=summary))
    assert [len(each) for each in asked] == [3, 6]
    seen = seen_by(engine, state, "bob")
    assert [name for name, _ in seen] == ["bob.system", "bob.system", START, "ann"]
    assert "Before that, 6 messages were said." in seen[1][1]
    assert state["handles"][-1]["system_texts"] == ["Before that, 6 messages were said."]


def test_a_summary_is_made_of_what_its_agent_may_see(engine: Engine) -> None:
    asked: list[BaseMessage] = []
    redacted = VisibilityMode("redacted", "words", transform=lambda words: "Redacted.")
    graph = line(agent("ann"), agent("eve"), agent("bob", history=HistoryLimit(last=1, summary=asked.extend)))
    graph.set_visibility("ann", "bob", redacted)
    graph.compile(engine=engine).invoke(QUESTION)
    assert [message.text for message in asked] == [QUESTION["messages"][0][1], "Redacted."]


@pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning")
def test_what_a_policy_keeps_from_an_agent_is_looked_for_in_what_is_summarised(engine: Engine) -> None:
    policy = Policy(confidential={"plan": {"ann"}}, channels={"words"}, on_violation="warn")  # type: ignore[arg-type]

    def made(summary: Any) -> Any:
        bob = agent("bob", history=HistoryLimit(last=0, summary=summary))
        graph = line(agent("plan", confidential=True), agent("ann"), bob, policy=policy)
        return graph.set_visibility("plan", "ann", "reencoded").compile(engine=engine)

    with pytest.warns(VisibilityWarning, match="the text of 'ann' may be derived from it"):
        made(lambda messages: "Nothing.").invoke(QUESTION)
    with warnings.catch_warnings(record=True) as told:
        made(None).invoke(QUESTION)
    assert not [each for each in told if "the words of 'ann'" in str(each.message)], "nobody was shown them"


@pytest.mark.parametrize("schema", [Report, Modelled, Data])
def test_an_update_is_told_the_state_with_what_was_said_in_any_form(engine: Engine, schema: Any) -> None:
    told: list[Any] = []

    def note(said: AIMessage, state: Any) -> dict[str, Any]:
        told.append(state if isinstance(state, dict) else vars(state))
        return {"plan": "noted", "messages": None}

    graph = ChoreoGraph(schema)
    graph.add_node(agent("ann", on_output=note)).add_edge(START, "ann")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert told[0]["messages"] == state["messages"] and len(told[0]["messages"]) == 2
    assert [entry["author"] for entry in told[0]["handles"]] == [START, "ann"] and state["plan"] == "noted"


def test_an_update_may_overwrite_what_was_said(engine: Engine) -> None:
    def again(said: AIMessage, state: Any) -> dict[str, Any]:
        return {"messages": Overwrite([state["messages"][0], said])}

    state = line(agent("ann"), agent("bob", on_output=again), agent("eve")).compile(engine=engine).invoke(QUESTION)
    assert [message.name for message in state["messages"]] == [None, "bob", "eve"]
    assert [name for name, _ in seen_by(engine, state, "eve")] == [START, "bob"]


@pytest.mark.parametrize("stock", [False, True])
def test_what_a_confidential_agents_update_says_is_confidential(engine: Engine, stock: bool) -> None:
    def more(said: AIMessage) -> dict[str, Any]:
        return {"messages": [AIMessage(f"Secret: {said.text}")]}

    options: Any = {"engine": engine, "reads": {"*": "shared"}} if stock else {}
    graph: Any = StateGraph(Report) if stock else ChoreoGraph(Report, visibility="shared")
    names = ("plan", "ann", "bob")
    for before, name in zip((START, *names), names, strict=False):
        own: Any = {"on_output": more, "confidential": True} if name == "plan" else {}
        reads: Any = {"reads": {"*": "shared", "plan": "reencoded"}} if name == "bob" else {}
        graph.add_node(name, agent(name, **own, **(options | reads)))
        graph.add_edge(before, name)
    app = graph.compile() if stock else graph.compile(engine=engine)
    state = app.invoke(QUESTION)
    assert [name for name, _ in seen_by(engine, state, "ann")] == [START]
    # In a stock graph nobody signs: whose it is, is what it says itself.
    said_by = START if stock else "plan"
    assert [name for name, _ in seen_by(engine, state, "bob")] == [START, "plan", said_by, "ann"]
    assert {(entry["author"], entry["confidential"]) for entry in state["handles"]} == {
        (START, False),
        ("plan", True),
        (said_by, True),
        ("ann", False),
        ("bob", False),
    }
    if not stock:
        assert not [found for found in app.audit(state).findings if found.reader == "ann"]


def test_instructions_are_kept_in_any_case(engine: Engine) -> None:
    graph = line(agent("ann"), agent("bob", history=1))
    state = graph.compile(engine=engine).invoke({"messages": [("system", "Be brief."), ("user", "What?")]})
    assert seen_by(engine, state, "bob")[0][1].endswith("Be brief.")
    assert len(seen_by(engine, state, "bob")) == 2


@pytest.mark.parametrize("history", ["last", -1, True, HistoryLimit])
def test_a_history_that_says_no_bound_is_refused(history: Any) -> None:
    with pytest.raises(InvalidRequestError, match="history"):
        agent("ann", history=history)
    with pytest.raises(InvalidRequestError, match="history"):
        HistoryLimit()
    with pytest.raises(InvalidRequestError, match="tokens of a history must be 1 or more"):
        HistoryLimit(tokens=0)


def test_nostream_keeps_an_agent_out_of_the_stream(engine: Engine) -> None:
    graph = line(agent("ann", tags=["nostream"]), agent("bob", metadata={"team": "red"}))
    parts = list(graph.compile(engine=engine).stream(QUESTION, stream_mode="messages"))
    streamed = [(chunk, metadata) for chunk, metadata in parts if chunk.type == "AIMessageChunk"]
    assert {metadata["langgraph_node"] for _, metadata in streamed} == {"bob"}
    assert all(metadata["team"] == "red" for _, metadata in streamed)


def test_an_agent_is_retried_as_its_node_says_and_no_wrapper_hides_it(engine: Engine) -> None:
    tried: list[int] = []

    def prompt(state: Any) -> str:
        tried.append(1)
        if len(tried) < 3:
            raise OSError("not yet")
        return "Go on."

    policy = RetryPolicy(initial_interval=0.01, jitter=False, retry_on=OSError)
    graph = ChoreoGraph()
    graph.add_node("ann", agent("ann", prompt=prompt), retry_policy=policy)
    graph.add_edge(START, "ann")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert len(tried) == 3 and state["messages"][-1].name == "ann"
    for other in (
        agent("bob").bind(stop=["x"]),
        agent("bob").with_retry(),
        agent("bob").with_config(configurable={"a": 1}),
        agent("bob").with_config(callbacks=[BaseCallbackHandler()]),
        agent("bob").with_listeners(on_end=lambda run: None),
        agent("bob").with_fallbacks([agent("eve")]),
    ):
        with pytest.raises(InvalidRequestError, match=r"wrapped|sequence"):
            ChoreoGraph().add_node("bob", other)
    ChoreoGraph().add_node("plain", RunnableLambda(lambda state: {}).with_retry())
