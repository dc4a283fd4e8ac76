"""One graph under several methods, with the same words: counts, functions that run once, strategies of synthesizers."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import interrupt

from choreo_agents import START, Agent, ChoreoGraph, Sampling, Send, Synthesizer, Worker, compare
from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.comparing import ComparedInput, Cost

SHORT = Sampling(max_tokens=6, temperature=1.0)
QUESTION = "What does Ann have?"


def looked_up(runs: list[Any]) -> ChoreoGraph:
    """An agent, a function that looks something up, and an agent who reads both."""

    def look(state: Any) -> dict[str, Any]:
        runs.append(state["messages"][-1].text)
        return {"messages": [AIMessage("Ann has 3 red kites.")]}

    graph = ChoreoGraph(visibility="shared").add_node(Agent("ann", sampling=SHORT)).add_node("look", look)
    graph.add_node(Agent("bob", sampling=SHORT))
    return graph.add_edge(START, "ann").add_edge("ann", "look").add_edge("look", "bob")


def test_functions_run_once_and_words_are_the_same_under_every_method(make_engine: MakeEngine) -> None:
    runs: list[Any] = []
    engine = make_engine()
    told: list[tuple[int, int]] = []
    found = compare(
        looked_up(runs).compile(engine=engine), [QUESTION], repeats=2, progress=lambda *done: told.append(done)
    )
    assert found.ways == ("choreo", "baseline", "naive") and told[-1] == (8, 8) == (len(told), 8)
    # The baseline that decodes freely may have said something else, of which nothing was known.
    assert len(runs) == len({*runs})
    costs = found.inputs[0].costs
    assert costs["choreo"].tokens_encoded < costs["naive"].tokens_encoded
    assert costs["naive"].tokens_reused == 0 < costs["choreo"].tokens_reused
    assert engine.stats().tokens_encoded == 0, "the graph's own engine has served nothing"


def test_functions_behind_functions_run_once_and_what_they_change_stays_theirs(engine: Engine) -> None:
    runs, notes = [], {"messages": [("user", QUESTION)]}

    def noted(name: str) -> Any:
        def note(state: Any) -> dict[str, Any]:
            runs.append(name)
            return {"messages": [("ai", f"{name} was here.")]}

        return note

    graph = ChoreoGraph(visibility="shared").add_node("f", noted("f")).add_node("g", noted("g"))
    graph.add_node(Agent("bob", sampling=SHORT)).add_edge(START, "f").add_edge("f", "g").add_edge("g", "bob")
    compare(graph.compile(engine=engine), [notes], methods=("choreo", "naive"), repeats=2)
    assert runs == ["f", "g"] and notes == {"messages": [("user", QUESTION)]}


def test_calls_that_share_a_place_are_refused(engine: Engine) -> None:
    inner = ChoreoGraph().add_node(Agent("ida", sampling=SHORT)).add_edge(START, "ida").compile(engine=engine)

    def ask(_: Any) -> dict[str, Any]:
        return {
            "messages": [("ai", inner.invoke({"messages": [("user", each)]})["messages"][-1].text) for each in "ab"]
        }

    refused(engine, "several times in one place", ChoreoGraph().add_node("ask", ask).add_edge(START, "ask"))


def test_what_asks_agents_does_so_under_every_method(make_engine: MakeEngine) -> None:
    engine, asked = make_engine(), []
    inner = ChoreoGraph().add_node(Agent("ida", sampling=SHORT)).add_edge(START, "ida").compile(engine=engine)

    async def ask(state: Any) -> dict[str, Any]:
        asked.append(1)
        said = await inner.ainvoke({"messages": [("user", QUESTION)]})
        return {"messages": [AIMessage(said["messages"][-1].text)]}

    graph = ChoreoGraph().add_node("ask", ask).add_node(Agent("bob", sampling=SHORT))
    app = graph.add_edge(START, "ask").add_edge("ask", "bob").compile(engine=engine)
    found = compare(app, [QUESTION], repeats=1)
    assert len(asked) == 5, "twice freely, three times with given words"
    assert len(found.inputs[0].words["choreo"]) == 2
    assert engine.stats().tokens_encoded == 0, "the graph that it calls is served by the same engine"


def test_functions_of_a_stock_graph_inside_run_once(make_engine: MakeEngine) -> None:
    engine, runs = make_engine(), []

    def look(_: Any) -> dict[str, Any]:
        runs.append(1)
        return {"messages": [AIMessage("Ann has 3 red kites.")]}

    inner = (
        StateGraph[Any, Any, Any, Any](MessagesState)
        .add_node("look", look)
        .add_node("ida", Agent("ida", engine=engine, sampling=SHORT))
    )
    inner.add_edge(START, "look").add_edge("look", "ida")
    graph = ChoreoGraph().add_node("inner", inner.compile()).add_edge(START, "inner")
    compare(graph.compile(engine=engine), [QUESTION], methods=("choreo", "naive"), repeats=2)
    assert len(runs) == 1


def test_agents_of_a_stock_graph_inside_are_served_by_the_same_method(make_engine: MakeEngine) -> None:
    engine = make_engine()
    inner = (
        StateGraph(MessagesState).add_node("ida", Agent("ida", engine=engine, sampling=SHORT)).add_edge(START, "ida")
    )
    graph = ChoreoGraph(visibility="shared").add_node("inner", inner.compile()).add_node(Agent("bob", sampling=SHORT))
    app = graph.add_edge(START, "inner").add_edge("inner", "bob").compile(engine=engine)
    found = compare(app, [QUESTION], methods=("choreo", "naive"), repeats=1)
    assert engine.stats().tokens_encoded == 0
    assert found.cost("naive").tokens_encoded > found.cost("choreo").tokens_encoded


def test_a_synthesizer_is_compared_by_its_strategies(make_engine: MakeEngine) -> None:
    worker = Worker("worker", sampling=SHORT)

    def route(state: Any) -> list[Send]:
        return [worker.send(state, f"Write part {part} of a long story about Ann and her kites.") for part in (1, 2)]

    graph = ChoreoGraph().add_node(worker).add_conditional_edges(START, route, ["worker"])
    graph.add_node(Synthesizer("editor", merges=["worker"], strategy="text", sampling=SHORT))
    app = graph.add_edge("worker", "editor", visibility="reencoded").compile(engine=make_engine())
    found = compare(app, [QUESTION], methods=("choreo",), strategies=("parallel", "sequential"), repeats=1)
    text, *merges = (found.cost(way).tokens_encoded for way in ("choreo", "parallel", "sequential"))
    assert max(merges) < text, "words of branches are encoded again by the text alone"
    assert found.columns == ("", "choreo", "parallel", "sequential", "parallel/choreo", "sequential/choreo")


def test_several_inputs_are_added_up(make_engine: MakeEngine) -> None:
    graph = ChoreoGraph().add_node(Agent("ann", sampling=SHORT)).add_edge(START, "ann")
    app = graph.compile(engine=make_engine(), checkpointer=InMemorySaver())
    found = compare(app, [QUESTION, {"messages": [("user", "And Bob?")]}], methods=("choreo", "baseline"), repeats=1)
    one, other = (each.costs["baseline"] for each in found.inputs)
    assert found.cost("baseline").tokens_encoded == one.tokens_encoded + other.tokens_encoded
    assert found.cost("baseline").first_token_s == pytest.approx((one.first_token_s + other.first_token_s) / 2)
    assert [row[0] for row in found.rows()] == ["tokens encoded", "tokens reused", "first token, ms", "end to end, ms"]
    assert not list(app.get_state_history({"configurable": {"thread_id": "compare 1"}}))


def test_who_first_says_something_else_is_named() -> None:
    said = {("ann", 0, 0, 0): "Yes.", ("bob", 1, 0, 0): "3 kites.", ("ann", 2, 0, 0): "So 3."}
    others = said | {("bob", 1, 0, 0): "4 kites.", ("ann", 2, 0, 0): "So 4."}
    cost = {"choreo": Cost(1, 0, 0.1, 0.1, 1)}
    assert ComparedInput(cost, {}, {"choreo": said, "baseline": others}).differs == "bob"
    assert ComparedInput(cost, {}, {"choreo": said, "baseline": {**said}}).differs is None


def refused(engine: Engine, message: str, graph: ChoreoGraph, inputs: Any = (QUESTION,), **options: Any) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        compare(graph.compile(engine=engine), inputs, repeats=1, **options)


def test_what_cannot_be_compared_is_refused(engine: Engine) -> None:
    def stop(_: Any) -> dict[str, Any]:
        return {"messages": [AIMessage(str(interrupt("Which?")))]}

    graph = ChoreoGraph().add_node(Agent("ann", sampling=SHORT)).add_edge(START, "ann")
    refused(engine, "must be a list", graph, QUESTION)
    refused(engine, "must be a list", graph, [])
    refused(engine, "compare takes 'choreo'", graph, methods=("choreo",))
    refused(engine, "compare takes 'choreo'", graph, methods=("baseline", "naive"))
    refused(engine, "compare takes 'choreo'", graph, methods=("choreo", "choreo"))
    refused(engine, "neither a state nor a text", graph, [7])
    silent = ChoreoGraph().add_node("f", lambda _: {"messages": []}).add_edge(START, "f")
    refused(engine, "no agent answers", silent)
    refused(engine, "strategy must be", graph, strategies=("bogus",))
    refused(engine, "no synthesizer", graph, strategies=("parallel",))
    asking = ChoreoGraph().add_node("stop", stop).add_edge(START, "stop")
    refused(engine, "a run was interrupted at stop", asking.add_node(Agent("ann")).add_edge("stop", "ann"))
