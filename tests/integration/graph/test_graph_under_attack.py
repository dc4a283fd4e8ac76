"""What a hostile review of the graph once broke, or could break unnoticed: each of these failed before."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from conftest import MakeEngine
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Overwrite
from pydantic import BaseModel
from support.graphs import QUESTION, SHORT, agent
from support.lineage import parents_of

from choreo_agents import (
    END,
    START,
    ChoreoGraph,
    ChoreoState,
    Command,
    Engine,
    MessageHandle,
    RunOptions,
    Sampling,
    Send,
    VisibilityRule,
)
from choreo_agents.engine.messages import thread_leases
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.workflows import debate, final_answer

HOT = Sampling(max_tokens=12, stop_tokens=(), temperature=1.0)


def chain(*names: str, **edges: Any) -> ChoreoGraph:
    """START to the first, each to the next; `edges` are options of the last edge."""
    graph = ChoreoGraph()
    for name in names:
        graph.add_node(agent(name))
    for i, name in enumerate(names):
        options = edges if i and name == names[-1] else {}
        graph.add_edge(START if i == 0 else names[i - 1], name, **options)
    return graph


def last_handle(state: dict[str, Any], author: str) -> MessageHandle:
    return MessageHandle.model_validate([e for e in state["handles"] if e["author"] == author][-1]["handle"])


def seen_by(engine: Engine, state: dict[str, Any], author: str) -> list[tuple[str | None, str]]:
    """Author and text of what an author's last message attended to."""
    parents = parents_of(engine, last_handle(state, author))
    return [(parent.author, engine.model.decode(list(parent.tokens), special=False)) for parent in parents]


def authors_seen(engine: Engine, state: dict[str, Any], author: str) -> list[str | None]:
    return [seen for seen, _ in seen_by(engine, state, author)]


def test_several_input_messages_keep_their_order(engine: Engine) -> None:
    inputs = [("system", "rule"), ("user", "one"), ("ai", "two"), ("user", "three"), ("user", "four")]
    for _ in range(5):
        state = chain("a").compile(engine=engine).invoke({"messages": inputs})
        assert [text.strip() for _, text in seen_by(engine, state, "a")[1:]] == ["rule", "one", "two", "three", "four"]


@pytest.mark.parametrize("visibility", [["private"], 5, "secret", {"a": "secret"}, {"a": 5}])
def test_a_visibility_of_no_known_form_is_refused_and_adds_no_edge(visibility: Any) -> None:
    graph = chain("a")
    graph.add_node(agent("b"))
    edges = set(graph.edges)
    with pytest.raises(VisibilityError, match="unknown visibility"):
        graph.add_edge("a", "b", visibility=visibility)
    assert graph.edges == edges


def test_edges_take_rules_and_histories(engine: Engine) -> None:
    assert chain("a", "b", visibility=VisibilityRule("private")).visibility_table()["b"]["a"] == VisibilityRule(
        "private"
    )
    table = chain("a", "b", visibility={"a": "reencoded"}, history=2).visibility_table()
    assert table["b"]["a"] == VisibilityRule("reencoded", 2)
    for bad in ({"history": 0}, {"visibility": VisibilityRule("shared"), "history": "last"}):
        with pytest.raises(VisibilityError, match="history"):
            chain("a", "b", **bad)
    assert engine.stats().messages == 0


def test_a_list_edge_declares_all_its_sources() -> None:
    graph = ChoreoGraph()
    for name in ("a", "b", "c"):
        graph.add_node(agent(name))
    graph.add_edge(["a", "b"], "c", visibility="reencoded")
    assert graph.visibility_table()["c"] == {"a": VisibilityRule("reencoded"), "b": VisibilityRule("reencoded")}


def test_private_is_not_bypassed_by_a_send_that_leaves_the_entries_out(engine: Engine) -> None:
    graph = ChoreoGraph()
    for name in ("pro", "judge", "press"):
        graph.add_node(agent(name))
    graph.add_edge(START, "pro")
    graph.add_edge("pro", "judge")
    graph.set_visibility("judge", "press").set_visibility("pro", "press", "private")

    def only_the_judge(state: Any) -> list[Send]:
        return [Send("press", {"handles": state["handles"][-1:]})]

    graph.add_conditional_edges("judge", only_the_judge, ["press"])
    with pytest.raises(VisibilityError, match="'pro' is declared private to 'press'"):
        graph.compile(engine=engine).invoke(QUESTION)


PLAIN = [HumanMessage("SECRET"), SystemMessage("SECRET"), AIMessage("SECRET"), ToolMessage("SECRET", tool_call_id="x")]


@pytest.mark.parametrize("message", PLAIN, ids=lambda message: message.type)
@pytest.mark.parametrize("mode", ["shared", "private"])
def test_what_a_plain_node_writes_is_its_own(engine: Engine, message: Any, mode: str) -> None:
    graph = ChoreoGraph()
    graph.add_node("plain", lambda _: {"messages": [message.model_copy()]})
    graph.add_node(agent("reader"))
    graph.add_edge(START, "plain")
    graph.add_edge("plain", "reader", visibility=mode)
    state = graph.compile(engine=engine).invoke(QUESTION)
    secrets = [author for author, text in seen_by(engine, state, "reader") if "SECRET" in text]
    assert secrets == (["plain"] if mode == "shared" else [])


@dataclasses.dataclass
class Update:
    messages: list[Any]


class Model(BaseModel):
    messages: list[Any]


SECRET = [AIMessage("SECRET")]
FORMS = {
    "a dataclass": lambda: Update(list(SECRET)),
    "a pydantic model": lambda: Model(messages=list(SECRET)),
    "a command": lambda: Command(update={"messages": list(SECRET)}),
    "a command of pairs": lambda: Command(update=[("messages", list(SECRET))]),
    "a list of commands": lambda: [Command(update={"messages": list(SECRET)})],
    "one message": lambda: {"messages": SECRET[0]},
    "an overwrite": lambda: {"messages": Overwrite(list(SECRET))},
    "a raw message": lambda: {"messages": [("ai", "SECRET")]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["shared", "private"])
def test_plain_nodes_may_return_what_langgraph_takes(engine: Engine, form: str, mode: str) -> None:
    graph = ChoreoGraph()
    graph.add_node("plain", lambda _: FORMS[form]())
    graph.add_node(agent("reader"))
    graph.add_edge(START, "plain")
    graph.add_edge("plain", "reader", visibility=mode)
    state = graph.compile(engine=engine).invoke(QUESTION)
    secrets = [author for author, text in seen_by(engine, state, "reader") if "SECRET" in text]
    assert secrets == (["plain"] if mode == "shared" else [])


def test_what_is_no_message_is_refused_and_not_taken_for_input(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node("plain", lambda _: {"messages": [object()]})
    graph.add_edge(START, "plain")
    with pytest.raises(InvalidRequestError, match="node 'plain' wrote to `messages` what is not a message"):
        graph.compile(engine=engine).invoke(QUESTION)


def test_what_a_stock_subgraph_says_is_said_by_its_node(engine: Engine) -> None:
    inner = StateGraph(ChoreoState)
    inner.add_node("search", lambda _: {"messages": list(SECRET)})
    inner.add_edge(START, "search")
    for mode, wanted in (("shared", ["team"]), ("private", [])):
        outer = ChoreoGraph()
        outer.add_node("team", inner.compile())
        outer.add_node(agent("reader"))
        outer.add_edge(START, "team")
        outer.add_edge("team", "reader", visibility=mode)
        state = outer.compile(engine=engine).invoke(QUESTION)
        assert [author for author, text in seen_by(engine, state, "reader") if "SECRET" in text] == wanted


def test_plain_nodes_of_subgraphs_are_told_from_those_outside(engine: Engine) -> None:
    inner = ChoreoGraph()
    inner.add_node("search", lambda _: {"messages": [AIMessage("INNER")]})
    inner.add_node(agent("reader"))
    inner.add_edge(START, "search")
    inner.add_edge("search", "reader")
    outer = ChoreoGraph()
    outer.add_node("search", lambda _: {"messages": [AIMessage("OUTER")]})
    outer.add_node("team", inner.compile(engine=engine))
    outer.add_node(agent("closer"))
    outer.add_edge(START, "search")
    outer.add_edge("search", "team")
    outer.add_edge("team", "closer")
    state = outer.compile(engine=engine).invoke(QUESTION)
    assert authors_seen(engine, state, "team|reader") == ["public root", START, "search", "team|search"]
    assert authors_seen(engine, state, "closer") == ["public root", START, "team|search", "team|reader"]


def test_a_plain_node_that_hands_on_the_whole_list_takes_nobodys_words(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node("plain", lambda state: {"messages": [*state["messages"], AIMessage("context")]})
    graph.add_node(agent("reader"))
    graph.add_edge(START, "plain")
    graph.add_edge("plain", "reader", visibility="private")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert authors_seen(engine, state, "reader") == ["public root", START]


def test_turns_that_plain_nodes_answered_stay_in_order(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node("faq", lambda state: {"messages": [AIMessage(f"canned {len(state['messages'])}")]})
    graph.add_node(agent("reader"))

    def router(state: Any) -> str:
        return "reader" if "agent" in str(state["messages"][-1].text) else "faq"

    graph.add_conditional_edges(START, router, ["faq", "reader"])
    graph.set_visibility("faq", "reader")
    app = graph.compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    for words in ("one", "two", "agent"):
        state = app.invoke({"messages": [("user", words)]}, config)
    texts = [text.strip() for _, text in seen_by(engine, state, "reader")[1:]]
    assert texts == ["one", "canned 1", "two", "canned 3", "agent"]


def test_removing_all_messages_inside_a_graph_empties_the_views(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node(agent("a"))
    graph.add_node("forget", lambda _: {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES)]})
    graph.add_node(agent("b", reads={"a": "shared"}))
    for start, end in ((START, "a"), ("a", "forget"), ("forget", "b")):
        graph.add_edge(start, end)
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert authors_seen(engine, state, "b") == ["public root"]


async def test_the_end_of_one_requests_scope_takes_nothing_from_another(engine: Engine) -> None:
    """The second request finds what the first has encoded, and goes on after the first one's scope has ended."""
    app = chain("a", "b", "c").compile(engine=engine)
    first_ran, second_began, first_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def first() -> None:
        with engine.scope():
            await app.ainvoke({"messages": [HumanMessage("same", id="q")]})
            first_ran.set()
            await asyncio.wait_for(second_began.wait(), 30)
        first_ended.set()

    async def second() -> None:
        await asyncio.wait_for(first_ran.wait(), 30)
        with engine.scope():
            async for _ in app.astream({"messages": [HumanMessage("same", id="q")]}, stream_mode="updates"):
                second_began.set()
                await asyncio.wait_for(first_ended.wait(), 30)

    await asyncio.gather(first(), second())
    assert engine.stats().leases == 0


def test_the_public_root_is_the_one_parent_of_system_prompts_and_input(engine: Engine) -> None:
    graph = ChoreoGraph(system="Hear each other.")
    graph.add_node(agent("a", system="Notes: x"))
    graph.add_edge(START, "a", visibility="shared")
    state = graph.compile(engine=engine).invoke(QUESTION)
    root, system, question = parents_of(engine, last_handle(state, "a"))
    assert engine.text(root.handle) == "<s><|system|> Hear each other.<|end|>"
    assert (system.author, system.parents) == ("a.system", (root.handle,))
    assert (question.author, question.parents) == (START, (root.handle,))


def test_several_calls_of_one_node_are_seen_in_the_order_of_the_calls(engine: Engine) -> None:
    voter = agent("voter", engine=engine, sampling=HOT)

    async def node(state: ChoreoState) -> dict[str, Any]:
        updates = [await voter.ainvoke(state) for _ in range(4)]
        return {key: [item for update in updates for item in update[key]] for key in ("handles", "messages")}

    graph = ChoreoGraph()
    graph.add_node("votes", node)
    graph.add_node(agent("judge"))
    graph.add_edge(START, "votes")
    graph.add_edge("votes", "judge")
    state = asyncio.run(graph.compile(engine=engine).ainvoke(QUESTION))
    said = [str(message.text) for message in state["messages"][1:5]]
    seen = [text.removeprefix(" voter:").strip() for _, text in seen_by(engine, state, "judge")[2:]]
    assert seen == said


def test_a_name_does_not_make_input_somebody_elses_words(engine: Engine) -> None:
    inputs = {"messages": [AIMessage("I am pro.", name="pro")]}
    state = chain("pro", "judge", visibility="private").compile(engine=engine).invoke(inputs)
    assert authors_seen(engine, state, "judge") == ["public root", START]


def test_a_subgraph_is_one_source_and_keeps_to_itself(engine: Engine) -> None:
    inner = ChoreoGraph()
    inner.add_node(agent("pro", system="Notes: Ann has 3 red kites."))
    inner.add_node(agent("judge"))
    inner.add_edge(START, "pro")
    inner.add_edge("pro", "judge")
    team = inner.compile(engine=engine)
    outer = ChoreoGraph()
    outer.add_node(agent("pro"))
    outer.add_node("team", team)
    outer.add_node(agent("closer"))
    outer.add_edge(START, "pro")
    outer.add_edge("pro", "team", visibility="private")
    outer.add_edge("team", "closer")
    state = outer.compile(engine=engine).invoke(QUESTION)
    assert authors_seen(engine, state, "team|judge") == ["public root", START, "team|pro"]
    assert authors_seen(engine, state, "closer") == ["public root", START, "team|pro", "team|judge"]


def test_edited_and_removed_messages_change_the_views(engine: Engine) -> None:
    app = chain("a", "b").compile(InMemorySaver(), engine=engine, interrupt_before=["b"])
    config: Any = {"configurable": {"thread_id": "t"}}
    state = app.invoke({"messages": [HumanMessage("QUESTION", id="q")]}, config)
    said = state["messages"][-1].id
    app.update_state(config, {"messages": [AIMessage("EDITED", id=said, name="a"), HumanMessage("NEW", id="q")]})
    state = app.invoke(None, config)
    assert [text.strip() for _, text in seen_by(engine, state, "b")[1:]] == ["NEW", "a: EDITED"]
    app.update_state(config, {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES)]})
    app.invoke({"messages": [HumanMessage("AGAIN", id="q2")]}, config)
    state = app.invoke(None, config)
    assert [text.strip() for _, text in seen_by(engine, state, "b")[1:-1]] == ["AGAIN"]


def test_votes_inside_one_node_differ_and_nobodys_words_are_lost(engine: Engine) -> None:
    voter, other = agent("voter", engine=engine, sampling=HOT), agent("other", engine=engine, sampling=HOT)

    async def node(state: ChoreoState) -> dict[str, Any]:
        updates = [await voter.ainvoke(state) for _ in range(3)]
        updates += await asyncio.gather(voter.ainvoke(state), other.ainvoke(state))
        return {key: [item for update in updates for item in update[key]] for key in ("handles", "messages")}

    graph = StateGraph(ChoreoState)
    graph.add_node("votes", node)
    graph.add_edge(START, "votes")
    state = asyncio.run(graph.compile().ainvoke(QUESTION))
    votes = [entry for entry in state["handles"] if entry["author"] == "votes"]
    assert len(votes) == 5 and len(state["messages"]) == 6
    assert len({entry["handle"]["id"] for entry in votes}) == 5


def test_branches_sent_to_a_subgraph_differ(engine: Engine) -> None:
    inner = ChoreoGraph()
    inner.add_node(agent("voter", sampling=HOT))
    inner.add_edge(START, "voter")
    outer = ChoreoGraph()
    outer.add_node("booth", inner.compile(engine=engine))
    outer.add_conditional_edges(START, lambda state: [Send("booth", state) for _ in range(4)], ["booth"])
    state = outer.compile(engine=engine).invoke(QUESTION)
    votes = [entry["handle"]["id"] for entry in state["handles"] if entry["author"] == "booth|voter"]
    assert len(votes) == len(set(votes)) == 4


def test_payloads_with_messages_of_any_form_are_told_apart(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node(agent("worker"))
    graph.add_node(agent("judge"))

    def fan_out(_: Any) -> list[Send]:
        return [Send("worker", {"messages": [("user", f"topic {i}")]}) for i in range(3)]

    graph.add_conditional_edges(START, fan_out, ["worker"])
    graph.add_edge("worker", "judge")
    state = graph.compile(engine=engine).invoke(QUESTION)
    texts = [engine.text(MessageHandle.model_validate(e["handle"])) for e in state["handles"] if e["author"] == START]
    assert [f"topic {i}" in " ".join(texts) for i in range(3)] == [True] * 3
    assert json.loads(json.dumps(state["handles"])) == state["handles"]


def test_running_a_graph_again_and_again_holds_a_bounded_number_of_leases(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_leases, "IDLE_RUNS", 2)
    engine = make_engine()
    app = chain("a", "b", visibility="reencoded").compile(engine=engine)

    def run() -> tuple[int, int]:
        state = app.invoke(QUESTION)
        for entry in state["handles"]:
            engine.release(MessageHandle.model_validate(entry["handle"]))
        return engine.stats().messages, engine.stats().leases

    # The root, of the last runs that nobody has gone on with, and nothing that the state does not name.
    assert [run() for _ in range(5)] == [(1, 1), (1, 2), (1, 2), (1, 2), (1, 2)]


def test_a_second_debate_in_one_thread_has_all_its_rounds(engine: Engine) -> None:
    app = debate({"a": "x", "b": "y"}, rounds=3, sampling=SHORT).compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    for turn in (1, 2):
        state = app.invoke(QUESTION, config)
        assert sum(entry["author"] == "a" for entry in state["handles"]) == 3 * turn


def test_debaters_see_each_other_as_told(engine: Engine) -> None:
    app = debate({"a": "x", "b": "y"}, rounds=2, sampling=SHORT, visibility="reencoded").compile(engine=engine)
    state = app.invoke(QUESTION)
    first = MessageHandle.model_validate(next(e for e in state["handles"] if e["author"] == "b")["handle"])
    assert first not in engine.inspect.ancestors(last_handle(state, "a"))


def test_the_final_answer_is_that_of_the_last_round() -> None:
    def say(name: str, words: str) -> AIMessage:
        return AIMessage(words, name=name)

    messages = [HumanMessage("?"), say("a", "Old. x"), say("b", "Old."), say("a", "New. y"), say("b", "New.")]
    assert final_answer(messages, ["a", "b"]) == "New."


def test_wrapped_agents_are_refused() -> None:
    for wrapped in (
        agent("a").with_fallbacks([agent("b")]),
        agent("a", reads={"b": "shared"}).with_config(configurable={}),
    ):
        with pytest.raises(InvalidRequestError, match="its declarations have no effect"):
            ChoreoGraph().add_node("a", wrapped)


def test_targets_of_conditional_edges_see_the_source(engine: Engine) -> None:
    graph = ChoreoGraph()
    for name in ("a", "b"):
        graph.add_node(agent(name))
    graph.add_edge(START, "a")
    graph.add_conditional_edges("a", lambda _: "b", ["b", END])
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert authors_seen(engine, state, "b") == ["public root", START, "a"]
    assert graph.set_visibility("a", "b", "private").visibility_table()["b"]["a"] == VisibilityRule("private")


def test_an_agent_inside_a_runnable_of_langchains(engine: Engine) -> None:
    alone = agent("alone", engine=engine)
    update = RunnableLambda(alone.invoke).invoke(QUESTION)
    assert update["messages"][0].name == "alone"


def test_agents_stand_in_a_sequence(engine: Engine) -> None:
    graph = ChoreoGraph().add_sequence([agent("a"), agent("b")])
    graph.add_edge(START, "a")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert "b" in {entry["author"] for entry in state["handles"]}


def test_what_happens_to_the_graph_later_does_not_change_the_compiled_one(engine: Engine) -> None:
    graph = chain("a", "b")
    app = graph.compile(engine=engine)
    before = app.get_graph().draw_mermaid()
    graph.set_visibility("b", "a")
    assert app.get_graph().draw_mermaid() == before
    assert asyncio.run(app.aget_graph()).draw_mermaid() == before and "shared" in before


class Watcher(BaseCallbackHandler):
    """Notes what LangChain is told of model runs."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.ended: list[str] = []
        self.errors: list[str] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
        self.seen.append([str(message.text) for message in messages[0]])

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.ended.append(response.generations[0][0].text)

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.errors.append(type(error).__name__)


def test_traces_show_the_view_and_how_each_decode_ended(engine: Engine) -> None:
    watcher = Watcher()
    app = chain("a", "b", visibility="private").compile(engine=engine)
    state = app.invoke(QUESTION, {"callbacks": [watcher]})
    assert watcher.seen == [["What does Ann have?"]] * 2
    assert watcher.ended == [str(message.text) for message in state["messages"][1:]]
    assert state["messages"][1].usage_metadata["input_tokens"] > 0
    assert watcher.errors == []


def test_a_decode_that_fails_is_reported_as_such(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher()
    app = chain("a").compile(engine=engine)
    executor = engine._core.loop.executor
    run = executor.run

    def failing(step: Any, samplers: Any) -> Any:
        return 1 / 0 if samplers else run(step, samplers)

    monkeypatch.setattr(executor, "run", failing)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        app.invoke(QUESTION, {"callbacks": [watcher]})
    assert watcher.errors == ["EngineFailedError"]


async def test_scopes_reach_through_the_sync_bridge(engine: Engine) -> None:
    """Also where the caller's thread runs an event loop, so that the agent runs on another."""
    app = chain("a").compile(engine=engine)
    with engine.scope():
        app.invoke(QUESTION)
        assert engine.stats().messages > 0
    assert engine.stats().messages == 0 and engine.stats().kv_bytes == 0


def test_runs_are_repeatable_and_seeds_matter(make_engine: MakeEngine) -> None:
    graph = ChoreoGraph()
    for name in ("a", "b"):
        graph.add_node(agent(name, sampling=HOT, assistant_prefix="I:"))
        graph.add_edge(START, name)
    graph.add_edge("a", "b")

    def run(**options: Any) -> list[str]:
        config: Any = {"configurable": {"choreo": RunOptions(**options)}}
        state = graph.compile(engine=make_engine()).invoke(QUESTION, config)
        return [str(message.text) for message in state["messages"][1:]]

    first = run()
    assert first == run() and first != run(seed=7)
    assert first[0] != first[1], "two nodes with the same request draw from different seeds"
