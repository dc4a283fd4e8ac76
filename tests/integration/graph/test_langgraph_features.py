"""What LangGraph gives its own graphs, a ChoreoGraph has too."""

from __future__ import annotations

import asyncio
from operator import add
from typing import Annotated, Any, Literal

import pytest
from conftest import MakeEngine
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import CachePolicy, RetryPolicy, interrupt
from support.graphs import QUESTION, agent
from support.lineage import parents_of

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Command, Engine, MessageHandle
from choreo_agents.errors import ReleasedHandleError


class Counted(ChoreoState, total=False):
    """With a channel that several nodes write."""

    visits: Annotated[list[str], add]


def chain(**options: Any) -> ChoreoGraph:
    graph = ChoreoGraph(system="Root.", **options)
    for name in ("pro", "con", "judge"):
        graph.add_node(agent(name, system=f"Notes of {name}."))
    graph.add_edge(START, "pro").add_edge("pro", "con").add_edge("con", "judge", visibility="reencoded")
    return graph.set_visibility("pro", "judge")


def views(engine: Engine, state: dict[str, Any]) -> dict[str, list[str]]:
    """Ids of each author's last message and of what it attended to."""
    handles = {entry["author"]: MessageHandle.model_validate(entry["handle"]) for entry in state["handles"]}
    return {
        author: [handle.id, *(parent.handle.id for parent in parents_of(engine, handle))]
        for author, handle in handles.items()
    }


def test_time_travel_forks_with_the_same_views(engine: Engine) -> None:
    app = chain().compile(checkpointer=InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "1"}}
    first = views(engine, app.invoke(QUESTION, config))
    for earlier in list(app.get_state_history(config)):
        if earlier.next and earlier.next != ("__start__",):
            again = app.invoke(None, earlier.config)
            assert views(engine, again) == first, earlier.next
    assert app.get_state(config).values["handles"]


def test_a_fork_with_other_words_has_other_views(engine: Engine) -> None:
    app = chain().compile(checkpointer=InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "1"}}
    first = views(engine, app.invoke(QUESTION, config))
    before_con = next(each for each in app.get_state_history(config) if each.next == ("con",))
    question = before_con.values["messages"][0]
    fork = app.update_state(before_con.config, {"messages": [question.model_copy(update={"content": "And Bob?"})]})
    forked = views(engine, app.invoke(None, fork))
    assert forked["pro"] == first["pro"], "it had spoken already"
    assert forked["con"] != first["con"] and forked["judge"] != first["judge"]


def test_an_interrupt_goes_on_where_it_stopped(engine: Engine) -> None:
    graph = ChoreoGraph(Counted, system="Root.")
    graph.add_node(agent("pro"))
    graph.add_node(agent("judge"))

    def approve(state: Any) -> dict[str, Any]:
        return {"visits": [interrupt("go on?")]}

    graph.add_node("approve", approve)
    graph.add_edge(START, "pro").add_edge("pro", "approve").add_edge("approve", "judge").set_visibility("pro", "judge")
    app = graph.compile(checkpointer=InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "1"}}
    stopped = app.invoke(QUESTION, config)
    assert "__interrupt__" in stopped
    state = app.invoke(Command(resume="yes"), config)
    assert state["visits"] == ["yes"] and views(engine, state)["pro"][0] in views(engine, state)["judge"]


def test_a_checkpoint_goes_on_in_a_new_engine_from_its_words(make_engine: MakeEngine) -> None:
    """As after a restart: no handle of the checkpoint is known; what an agent is always asked it still knows."""
    graph = ChoreoGraph(system="Root.")
    graph.add_node(agent("pro", prompt="Say it.")).add_node(agent("judge"))
    graph.add_edge(START, "pro").add_edge("pro", "judge").add_conditional_edges(
        "judge", lambda state: "pro" if len(state["handles"]) < 5 else END, ["pro", END]
    )
    saver: Any = InMemorySaver()
    config: Any = {"configurable": {"thread_id": "1"}}
    first = graph.compile(saver, engine=make_engine(salt="s"), interrupt_before=["judge"]).invoke(QUESTION, config)
    engine = make_engine(salt="s")
    app = graph.compile(saver, engine=engine, interrupt_after=["judge"])
    state = app.invoke(None, config)
    old, new = first["handles"], state["handles"]
    assert [(e["author"], e["superstep"]) for e in new[:2]] == [(e["author"], e["superstep"]) for e in old]
    assert new[0]["handle"] == old[0]["handle"] and new[1]["handle"] != old[1]["handle"]
    copy = MessageHandle.model_validate(new[1]["handle"])
    assert [parent.author for parent in parents_of(engine, copy)] == ["public root"]
    assert str(state["messages"][1].text) in engine.text(copy, special=False)
    assert views(engine, state)["judge"][2:] == [new[0]["handle"]["id"], new[1]["handle"]["id"]]
    encoded = engine.stats().tokens_encoded
    state = app.invoke(None, config)  # pro again: what it is asked, its own first words, what it is asked
    seen = parents_of(engine, MessageHandle.model_validate(state["handles"][-2]["handle"]))
    assert [parent.author for parent in seen] == ["public root", START, "pro.system", "pro", "judge", "pro.system"]
    assert copy in [parent.handle for parent in seen], "computed again once"
    assert engine.stats().tokens_encoded > encoded


def test_a_released_handle_of_a_checkpoint_stays_refused(engine: Engine) -> None:
    saver: Any = InMemorySaver()
    config: Any = {"configurable": {"thread_id": "1"}}
    app = chain().compile(saver, engine=engine, interrupt_before=["con"])
    state = app.invoke(QUESTION, config)
    engine.release(MessageHandle.model_validate(state["handles"][1]["handle"]))
    with pytest.raises(ReleasedHandleError):
        app.invoke(None, config)


def test_command_goto_and_conditional_edges(engine: Engine) -> None:
    graph = ChoreoGraph(Counted, system="Root.")
    for name in ("pro", "con", "judge"):
        graph.add_node(agent(name))

    def referee(state: Any) -> Command[Literal["con", "judge"]]:
        return Command(goto="con" if len(state["handles"]) < 3 else "judge", update={"visits": ["referee"]})

    graph.add_node("referee", referee)
    graph.add_edge(START, "pro").add_edge("pro", "referee").add_edge("con", "referee").set_visibility("pro", "con")
    graph.set_visibility("con", "judge")
    graph.add_conditional_edges("judge", lambda state: END, [END])
    state = graph.compile(engine=engine).invoke(QUESTION)
    seen = views(engine, state)
    assert state["visits"] == ["referee", "referee"]
    assert seen["pro"][0] in seen["con"] and seen["con"][0] in seen["judge"] and seen["pro"][0] not in seen["judge"]


def test_a_deferred_join_waits_for_the_longer_path(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    for name in ("pro", "con", "aside"):
        graph.add_node(agent(name))
    graph.add_node("judge", agent("judge"), defer=True)
    graph.add_edge(START, "pro").add_edge(START, "con").add_edge("con", "aside")
    graph.add_edge("pro", "judge").add_edge("aside", "judge")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert [entry["author"] for entry in state["handles"]].count("judge") == 1
    seen = views(engine, state)
    assert seen["pro"][0] in seen["judge"] and seen["aside"][0] in seen["judge"]


def test_retries_and_caches_of_nodes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([ConnectionError("once")])
    speak = Agent.ainvoke

    async def flaky(self: Agent, *args: Any, **options: Any) -> Any:
        for error in failures:
            raise error
        return await speak(self, *args, **options)

    monkeypatch.setattr(Agent, "ainvoke", flaky)
    graph = ChoreoGraph(system="Root.")
    policy = RetryPolicy(initial_interval=0.01, retry_on=ConnectionError)
    graph.add_node("pro", agent("pro"), retry_policy=policy, cache_policy=CachePolicy())
    graph.add_edge(START, "pro")
    app = graph.compile(engine=engine, cache=InMemoryCache())
    question = {"messages": [{"role": "user", "content": "Who?", "id": "1"}]}
    first = asyncio.run(app.ainvoke(question))
    decoded = engine.stats().decode_steps
    assert asyncio.run(app.ainvoke(question))["handles"] == first["handles"]
    assert engine.stats().decode_steps == decoded


def team(engine: Engine) -> Any:
    inner = ChoreoGraph(system="Root.")
    inner.add_node(agent("pro", system="Notes.")).add_node(agent("judge"))
    inner.add_edge(START, "pro").add_edge("pro", "judge")
    graph = ChoreoGraph(system="Root.")
    graph.add_node("team", inner.compile(engine=engine)).add_node(agent("press"))
    graph.add_edge(START, "team").add_edge("team", "press")
    return graph.compile(engine=engine)


def test_a_subgraphs_agents_are_audited_and_drawn(engine: Engine) -> None:
    app = team(engine)
    report = app.audit()
    assert [context.name for context in report.contexts] == ["team|pro.system"]
    assert {(f.context, f.reader, f.channel) for f in report.findings} == {
        ("team|pro.system", "team|judge", "encoding"),
        ("team|pro.system", "press", "encoding"),
    }
    state = app.invoke(QUESTION)
    assert {(f.context, f.reader, f.channel) for f in app.audit(state).findings} == {
        (f.context, f.reader, f.channel) for f in report.findings
    }
    drawn = app.get_graph(xray=True)
    labels = {(edge.source, edge.target): edge.data for edge in drawn.edges}
    assert labels["team:pro", "team:judge"] == "shared"
    assert "shared" in drawn.draw_mermaid()


def test_the_schema_that_studio_asks_for_is_drawn_with_labels(engine: Engine) -> None:
    """The server's graph endpoint sends the drawing as JSON."""
    sent = chain().compile(engine=engine).get_graph().to_json()
    labels = {(edge["source"], edge["target"]): edge.get("data") for edge in sent["edges"]}
    assert (
        labels["pro", "con"] == "shared"
        and labels["con", "judge"] == "reencoded"
        and labels["pro", "judge"] == "shared"
    )
    assert chain().compile(engine=engine).get_input_jsonschema()["properties"]["messages"]
