"""Graphs of agents: who sees what, in which order, under which LangGraph features."""

from __future__ import annotations

import asyncio
import logging
import operator
from typing import Annotated, Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from support.graphs import QUESTION, SHORT, agent, branches
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
from choreo_agents.engine.constraints import Detokenizer
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.workflows import debate


def pair(mode: Any = None, **options: Any) -> ChoreoGraph:
    """pro speaks, then judge, who sees pro as told."""
    graph = ChoreoGraph(system="Agents read their notes.")
    graph.add_node(agent("pro", system="Notes: Ann has 3 red kites."))
    graph.add_node(agent("judge"))
    graph.add_edge(START, "pro")
    graph.add_edge("pro", "judge", visibility=mode, **options)
    graph.add_edge("judge", END)
    return graph


def handle_of(state: dict[str, Any], author: str) -> MessageHandle:
    [entry] = [entry for entry in state["handles"] if entry["author"] == author]
    return MessageHandle.model_validate(entry["handle"])


def authors_seen(engine: Engine, handle: MessageHandle) -> set[str | None]:
    """Authors of the messages that a decode attended to directly."""
    return {parent.author for parent in parents_of(engine, handle)}


def test_a_shared_edge_hands_over_the_encoding_itself(engine: Engine) -> None:
    state = pair().compile(engine=engine).invoke(QUESTION)
    pro, judge = handle_of(state, "pro"), handle_of(state, "judge")
    assert pro in engine.inspect.ancestors(judge)
    assert authors_seen(engine, judge) == {"public root", START, "pro"}


def test_a_reencoded_edge_hands_over_words_only(engine: Engine) -> None:
    state = pair("reencoded").compile(engine=engine).invoke(QUESTION)
    pro, judge = handle_of(state, "pro"), handle_of(state, "judge")
    assert pro not in engine.inspect.ancestors(judge)
    [copy] = [p for p in parents_of(engine, judge) if p.author == "pro"]
    assert list(copy.tokens) == engine.tokens(pro)
    assert [p.author for p in parents_of(engine, copy.handle, judge)] == ["public root", START]
    assert "pro.system" not in {*engine.inspect.ancestors(judge).values()}


def test_a_private_edge_hands_over_nothing(engine: Engine) -> None:
    state = pair("private").compile(engine=engine).invoke(QUESTION)
    assert authors_seen(engine, handle_of(state, "judge")) == {"public root", START}


def test_an_undeclared_source_is_not_in_the_view(engine: Engine) -> None:
    graph = pair()
    graph.add_node(agent("third"))
    graph.add_edge("judge", "third")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert authors_seen(engine, handle_of(state, "third")) == {"public root", START, "judge"}


def test_private_holds_through_others(engine: Engine) -> None:
    """pro is private to third: the judge's encoding attended to pro, so it may not be shared on."""
    graph = pair()
    graph.add_node(agent("third"))
    graph.add_edge("judge", "third").set_visibility("pro", "third", "private")
    with pytest.raises(
        VisibilityError, match=r"'pro' is declared private to 'third'.*visibility of 'judge' to 'third' to 'ree"
    ):
        graph.compile(engine=engine).invoke(QUESTION)


def test_private_holds_through_others_unless_words_are_reencoded(engine: Engine) -> None:
    graph = pair()
    graph.add_node(agent("third"))
    graph.add_edge("judge", "third", visibility={"judge": "reencoded", "pro": "private"})
    state = graph.compile(engine=engine).invoke(QUESTION)
    third = handle_of(state, "third")
    assert handle_of(state, "pro") not in engine.inspect.ancestors(third)


def test_private_holds_through_copies_that_were_reencoded_for_others(engine: Engine) -> None:
    """The judge saw a copy of pro's words only; sharing the judge's encoding would still hand them on."""
    graph = pair("reencoded")
    graph.add_node(agent("third"))
    graph.add_edge("judge", "third").set_visibility("pro", "third", "private")
    with pytest.raises(VisibilityError, match="'pro' is declared private to 'third'"):
        graph.compile(engine=engine).invoke(QUESTION)


def test_an_agent_speaks_outside_langgraph_too(engine: Engine) -> None:
    update = agent("alone", engine=engine).invoke({"messages": [("user", "What does Ann have?"), ("user", "And Bob?")]})
    assert [entry["author"] for entry in update["handles"]] == [START, START, "alone"]
    assert len({entry["message_id"] for entry in update["handles"]}) == 3


def test_input_can_be_declared_private(engine: Engine) -> None:
    graph = pair("reencoded")
    graph.set_visibility(START, "judge", "private")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert authors_seen(engine, handle_of(state, "judge")) == {"public root", "pro"}


def test_views_are_ordered_by_superstep_then_own_then_declared_order(engine: Engine) -> None:
    notes = {name: f"Notes: {name}" for name in ("zoe", "alice", "mia")}
    app = debate(notes, rounds=3, sampling=SHORT).compile(engine=engine)
    state = app.invoke(QUESTION)
    last = [e for e in state["handles"] if e["author"] == "alice"][-1]
    parents = parents_of(engine, MessageHandle.model_validate(last["handle"]))
    assert [p.author for p in parents] == ["public root", "alice.system", START, "alice", "alice", "zoe", "mia"]
    by_id = {e["handle"]["id"]: e["superstep"] for e in state["handles"]}
    # The question is a copy that was encoded again for this reader alone.
    assert [by_id[p.handle.id] for p in parents[3:]] == [1, 2, 2, 2]


def test_history_keeps_the_last_supersteps_only(engine: Engine) -> None:
    graph = ChoreoGraph()
    for name in ("one", "two"):
        graph.add_node(agent(name))
    graph.add_edge(START, "one")
    graph.add_edge("one", "two", history=2)
    state: dict[str, Any] = dict(QUESTION)
    app = graph.compile(engine=engine, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    for words in ("first", "second", "third"):
        state = app.invoke({"messages": [("user", words)]}, config)
    last = [e for e in state["handles"] if e["author"] == "two"][-1]
    parents = parents_of(engine, MessageHandle.model_validate(last["handle"]))
    assert [p.author for p in parents if p.author == "one"] == ["one"] * 2
    assert [p.author for p in parents if p.author == START] == [START] * 3
    assert [p.author for p in parents if p.author == "two"] == ["two"] * 2


def test_a_stock_state_graph_takes_agents_with_reads(engine: Engine) -> None:
    graph = StateGraph(ChoreoState)
    graph.add_node("pro", agent("Pro", engine=engine, system="Notes: Ann has 3 red kites."))
    graph.add_node("judge", agent("Judge", engine=engine, reads={"pro": VisibilityRule("shared", history="last")}))
    graph.add_edge(START, "pro")
    graph.add_edge("pro", "judge")
    state = graph.compile().invoke(QUESTION)
    assert authors_seen(engine, handle_of(state, "judge")) == {"public root", START, "pro"}
    assert "Pro:" in engine.text(handle_of(state, "pro"))


def test_the_words_are_mirrored_as_messages(engine: Engine) -> None:
    state = pair().compile(engine=engine).invoke(QUESTION)
    human, pro, judge = state["messages"]
    assert isinstance(human, HumanMessage) and isinstance(judge, AIMessage)
    entry = state["handles"][1]
    assert (pro.name, pro.id) == (entry["author"], entry["message_id"])
    assert pro.response_metadata["choreo"]["handle"] == entry["handle"]["id"]
    assert str(pro.text) in engine.text(handle_of(state, "pro"), special=False)
    # The first who reads the question as it came in is the judge: pro has read it behind its notes.
    assert judge.usage_metadata["input_token_details"]["cache_read"] == sum(
        p.handle.length for p in parents_of(engine, handle_of(state, "judge")) if p.author != START
    )


def test_an_agents_turn_end_is_encoded_also_when_cut_short(engine: Engine) -> None:
    state = pair().compile(engine=engine).invoke(QUESTION)
    assert engine.text(handle_of(state, "pro")).endswith("<|end|>")
    assert handle_of(state, "pro").length == len(engine.model.encode("<|assistant|> pro:")) + 6 + 1


def test_a_plain_nodes_message_is_encoded_under_its_name(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node("tool", lambda _: {"messages": [AIMessage("Ann has 3 red kites.", name="tool")]})
    graph.add_node(agent("reader"))
    graph.add_edge(START, "tool")
    graph.add_edge("tool", "reader")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert engine.text(handle_of(state, "tool")) == "<|assistant|> tool: Ann has 3 red kites.<|end|>"
    assert "tool" in authors_seen(engine, handle_of(state, "reader"))


def test_messages_that_hold_more_than_text_are_refused(engine: Engine) -> None:
    picture = {"type": "image", "url": "x"}
    with pytest.raises(InvalidRequestError, match="more than text"):
        pair().compile(engine=engine).invoke({"messages": [HumanMessage([picture])]})


def test_send_branches_are_told_apart_and_kept_in_order(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node(agent("worker", sampling=SHORT.model_copy(update={"temperature": 1.0})))
    graph.add_node(agent("judge", reads={"worker": "shared"}))
    graph.add_conditional_edges(START, lambda state: [Send("worker", state) for _ in range(4)], ["worker"])
    graph.add_edge("worker", "judge")
    state = graph.compile(engine=engine).invoke(QUESTION)
    workers = [entry for entry in state["handles"] if entry["author"] == "worker"]
    assert [entry["branch"] for entry in workers] == [0, 1, 2, 3]
    assert len({entry["handle"]["id"] for entry in workers}) == 4, "each branch draws from its own seed"
    parents = parents_of(engine, handle_of(state, "judge"))
    assert [p.handle.id for p in parents if p.author == "worker"] == [e["handle"]["id"] for e in workers]


def test_command_goto_and_extended_state(engine: Engine) -> None:
    class Counted(ChoreoState, total=False):
        visits: Annotated[int, operator.add]

    graph = ChoreoGraph(Counted)
    graph.add_node(agent("speaker"))

    def router(state: Any) -> Command[str]:
        return Command(update={"visits": 1}, goto="speaker" if state.get("visits", 0) < 2 else END)

    graph.add_node("router", router, destinations=("speaker", END))
    graph.add_edge(START, "router")
    graph.add_edge("speaker", "router")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert state["visits"] == 3 and sum(e["author"] == "speaker" for e in state["handles"]) == 2


def test_a_choreo_graph_as_a_subgraph(engine: Engine) -> None:
    inner = pair().compile(engine=engine)
    outer = StateGraph(ChoreoState)
    outer.add_node("team", inner)
    outer.add_node("closer", agent("closer", engine=engine, reads={"team": "shared"}))
    outer.add_edge(START, "team")
    outer.add_edge("team", "closer")
    app = outer.compile()
    state = app.invoke(QUESTION)
    assert [e["author"] for e in state["handles"]] == [START, "team|pro", "team|judge", "closer"]
    assert [e["superstep"] for e in state["handles"]] == [0, 1, 2, 3]
    assert authors_seen(engine, handle_of(state, "closer")) == {"public root", START, "team|pro", "team|judge"}
    assert "shared" in app.get_graph(xray=True).draw_mermaid()


def test_drawing_shows_visibilities_on_edges(engine: Engine) -> None:
    graph = pair("reencoded", history="last")
    graph.add_node(agent("third")).add_edge("judge", "third").set_visibility("pro", "third", "shared")
    app = graph.compile(engine=engine)
    for drawn in (app.get_graph(), app.with_config(tags=["x"]).get_graph()):
        mermaid = drawn.draw_mermaid().replace("&nbsp;", "")
        assert "pro -- reencoded, last --> judge" in mermaid
        assert "judge -- shared --> third" in mermaid
        assert "pro -. shared .-> third" in mermaid


def test_the_graph_compiles_again_with_another_engine(make_engine: MakeEngine) -> None:
    graph = pair()
    first, second = make_engine(), make_engine(method="naive")
    graph.compile(engine=first).invoke(QUESTION)
    graph.compile(engine=second).invoke(QUESTION)
    assert first.stats().messages == second.stats().messages + 0 > 0


def test_one_graph_runs_under_all_methods(make_engine: MakeEngine) -> None:
    encoded = []
    for method in ("choreo", "baseline", "naive"):
        engine = make_engine(method=method)
        state = pair().compile(engine=engine).invoke(QUESTION)
        assert [entry["author"] for entry in state["handles"]] == [START, "pro", "judge"]
        encoded.append(engine.stats().tokens_encoded)
    assert encoded[0] < encoded[2] and encoded[1] < encoded[2]


BAD_GRAPHS = {
    "a source that is no node": (
        lambda g, e: g.set_visibility("nobody", "judge").compile(engine=e),
        "names 'nobody', which is not a node",
    ),
    "a reader that is no node": (
        lambda g, e: g.set_visibility("pro", "nobody").compile(engine=e),
        "names 'nobody', which is not a node",
    ),
    "a mode that does not exist": (
        lambda g, e: g.set_visibility("judge", "pro", "secret"),
        "unknown visibility 'secret'",
    ),
    "a history of zero": (lambda g, e: g.set_visibility("judge", "pro", history=0), "history must be"),
    "a view for END": (lambda g, e: g.add_edge("pro", END, visibility="shared"), "END reads nothing"),
    "two declarations": (lambda g, e: g.set_visibility("pro", "judge", "private"), "declared twice"),
}


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_a_bad_declaration_is_refused(engine: Engine, name: str) -> None:
    build, message = BAD_GRAPHS[name]
    with pytest.raises(VisibilityError, match=message):
        build(pair("reencoded"), engine)


def test_an_agent_without_an_engine_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'pro' has no engine"):
        pair().compile()
    with pytest.raises(InvalidRequestError, match="'pro' has no engine"):
        agent("pro").invoke(QUESTION)


def test_custom_headers_start_the_message(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node(agent("aff", assistant_prefix="Affirmative:"))
    graph.add_edge(START, "aff")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert engine.text(handle_of(state, "aff")).startswith("<|assistant|> Affirmative:")


async def test_streaming_messages_and_custom_events(engine: Engine) -> None:
    app = pair().compile(engine=engine)
    words: dict[str, str] = {}
    ids: dict[str, set[str | None]] = {}
    events = []
    async for mode, item in app.astream(QUESTION, stream_mode=["messages", "custom", "values"]):
        if mode == "messages":
            chunk, metadata = item
            node = metadata["langgraph_node"]
            words[node] = words.get(node, "") + str(chunk.text)
            ids.setdefault(node, set()).add(chunk.id)
        elif mode == "custom":
            events.append(item)
        else:
            state = item
    for message in state["messages"][1:]:
        assert words[message.name].strip() == str(message.text)
        assert ids[message.name] == {message.id}
    assert [(event["type"], event["agent"]) for event in events] == [
        ("choreo.decode", "pro"),
        ("choreo.decode", "judge"),
    ]
    assert events[0]["ttft_s"] > 0
    found = [(event["tokens_encoded"] > 0, event["tokens_reused"] > 0, event["tokens_recomputed"]) for event in events]
    assert found == [(True, False, 0), (True, True, 0)], "the first agent of a cold engine finds nothing"


async def test_tokens_that_nobody_takes_stay_on_the_engines_thread(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many branches at once would pay for each token on the event loop, beside the engine."""
    found, added = list[Any](), list[int]()
    add = Detokenizer.add
    monkeypatch.setattr(Detokenizer, "add", lambda self, token: added.append(token) or add(self, token))
    for modes in (["custom", "values"], ["custom", "values", "messages"]):
        before, events = len(added), list[Any]()
        engine = make_engine()
        async for mode, item in pair().compile(engine=engine).astream(QUESTION, stream_mode=modes):
            if mode == "custom":
                events.append(item)
            elif mode == "values":
                state = item
        assert (len(added) > before) == ("messages" in modes)
        for event in events:
            usage = engine.usage(handle_of(state, event["agent"]))
            assert usage.ttft_s is not None and 0 < event["ttft_s"] < event["duration_s"]
            if "messages" not in modes:
                # Its first token came as long before its end as the engine says.
                assert event["ttft_s"] <= event["duration_s"] - (usage.duration_s - usage.ttft_s)
        messages = state["messages"][1:]
        said = [(m.name, m.content, m.usage_metadata, m.response_metadata["finish_reason"]) for m in messages]
        found.append((said, [(event["agent"], event["words"], event["tokens_encoded"]) for event in events]))
    assert found[0] == found[1] and len(found[0][1]) == 2


def run_debate(engine: Engine, *, saver: Any, interrupt: bool) -> dict[str, Any]:
    """Three rounds at temperature 1, in one go or interrupted before every round."""
    notes = {name: f"Notes: {name}" for name in ("alice", "bruno", "clara")}
    sampling = Sampling(temperature=1.0, max_tokens=8, stop_tokens=())
    app = debate(notes, rounds=3, sampling=sampling).compile(
        saver, engine=engine, interrupt_before=["moderator"] if interrupt else None
    )
    config = {"configurable": {"thread_id": "t"}}
    state = app.invoke({"messages": [HumanMessage("What does Ann have?", id="q")]}, config)
    while app.get_state(config).next:
        assert interrupt
        state = app.invoke(None, config)
    return state


def test_an_interrupted_debate_ends_as_an_uninterrupted_one(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        whole = run_debate(make_engine(salt="s"), saver=InMemorySaver(), interrupt=False)
        resumed = run_debate(make_engine(salt="s"), saver=InMemorySaver(), interrupt=True)
    assert [m.text for m in resumed["messages"]] == [m.text for m in whole["messages"]]
    assert [e["handle"] for e in resumed["handles"]] == [e["handle"] for e in whole["handles"]]
    assert len(resumed["handles"]) == 1 + 9
    assert not caplog.records, "the serializer must have nothing to complain about"


def test_a_node_rerun_after_an_interrupt_finds_its_answer(engine: Engine) -> None:
    """`interrupt()` after the agent spoke, inside the same node: LangGraph runs the node again from its start."""
    from langgraph.types import interrupt

    speaker = agent("speaker", engine=engine, sampling=Sampling(temperature=1.0, max_tokens=12, stop_tokens=()))
    handles = []

    async def node(state: ChoreoState, config: RunnableConfig) -> dict[str, Any]:
        update = await speaker.ainvoke(state, config)
        handles.append(update["handles"][-1]["handle"]["id"])
        interrupt("may it be published?")
        return update

    graph = StateGraph(ChoreoState)
    graph.add_node("speaker", node)
    graph.add_edge(START, "speaker")
    app = graph.compile(InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}

    async def run() -> int:
        await app.ainvoke(QUESTION, config)
        steps = engine.stats().steps
        await app.ainvoke(Command(resume=True), config)
        return engine.stats().steps - steps

    assert asyncio.run(run()) == 0
    assert handles[0] == handles[1]


def test_two_runs_of_one_thread_share_nothing_by_accident(engine: Engine) -> None:
    """Two voters with the same view never share one answer, though their request is the same."""
    app = branches(["a", "b"], Sampling(temperature=1.0, max_tokens=12, stop_tokens=())).compile(engine=engine)
    first, second = app.invoke(QUESTION), app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=7)}})
    assert [m.text for m in first["messages"][1:]] != [m.text for m in second["messages"][1:]]
    again = app.invoke(QUESTION)
    assert [m.text for m in first["messages"][1:]] == [m.text for m in again["messages"][1:]]


def test_debates_of_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two agents"):
        debate({"alice": "x"})
    with pytest.raises(ValueError, match="at least one round"):
        debate({"alice": "x", "bruno": "y"}, rounds=0)
