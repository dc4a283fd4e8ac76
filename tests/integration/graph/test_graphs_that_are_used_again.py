"""Graphs in a second engine, on one thread twice, inside other graphs, and after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Memory, Policy, Sampling, Synthesizer, Worker
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.workflows import Role, iterative_debate, prisoners_dilemma, tree_of_thoughts

SHORT = Sampling(max_tokens=6)
ROOMY = Sampling(max_tokens=24)
FACT = {"messages": [("user", "Ann has 3 red kites.")]}
ROLES = {name: Role(name.title()) for name in ("affirmative", "negative", "moderator")}


@pytest.fixture
def engine(embedded: LoadedModel) -> Any:
    with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 26), salt="s") as loaded:
        yield loaded


def views(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[tuple[str, int]]]]:
    """What every decode from now on sees: author, then texts and offsets."""
    seen: list[tuple[str, list[tuple[str, int]]]] = []
    stream = Engine.astream

    def spy(self: Any, header: Any, parents: Any, **options: Any) -> Any:
        texts = [self.text(parent) for parent in parents]
        seen.append((options["author"], list(zip(texts, options["offsets"], strict=True))))
        return stream(self, header, parents, **options)

    monkeypatch.setattr(Engine, "astream", spy)
    return seen


def headers(engine: Engine, state: Any) -> list[str]:
    texts = [engine.text(MessageHandle.model_validate(entry["handle"])) for entry in state["handles"]]
    return [text.split(":")[0] for text in texts]


def test_answers_that_a_function_makes_are_outside_of_the_audits_proof() -> None:
    graph = ChoreoGraph(policy=Policy(confidential={"spy": frozenset({"spy"})}, channels=frozenset({"words"})))
    graph.add_node("spy", Agent("Alice", confidential=True))
    graph.add_node("teller", Agent("Bruno", choices=lambda state: [m.text for m in state["messages"]]))
    graph.add_edge(START, "spy").add_edge("spy", "teller", visibility="private")
    assert [each for each in graph.audit().outside if "'teller'" in each and "choices" in each]


def test_in_another_engine_messages_keep_who_said_them(engine: Engine, embedded: LoadedModel) -> None:
    def build() -> ChoreoGraph:
        writer = Worker("writer", sampling=SHORT)
        graph = ChoreoGraph(system="S.")
        graph.add_node(writer)
        graph.add_node("notes", Agent("Emma", assistant_prefix="Emma notes:", sampling=SHORT))
        graph.add_node("judge", Agent("Judge", sampling=SHORT))
        route = [("Write part 1.", "Clara"), ("Write part 2.", "David")]
        sends = lambda state: [writer.send(state, told, speaker=name) for told, name in route]  # noqa: E731
        graph.add_conditional_edges(START, sends, ["writer"])
        graph.add_edge("writer", "notes").add_edge("notes", "judge").add_edge("judge", END)
        return graph

    saver, config = InMemorySaver(), {"configurable": {"thread_id": "t"}}
    before = build().compile(saver, engine=engine, interrupt_before=["judge"]).invoke(FACT, config)
    told = headers(engine, before)
    assert told[1:] == ["<|assistant|> Clara", "<|assistant|> David", "<|assistant|> Emma notes"]
    with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 26), salt="s") as other:
        after = build().compile(saver, engine=other).invoke(None, config)
        assert headers(other, after) == [*told, "<|assistant|> Judge"]


def test_in_another_engine_an_agent_still_knows_what_it_is_always_asked(
    engine: Engine, embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = views(monkeypatch)
    saver, config = InMemorySaver(), {"configurable": {"thread_id": "t"}}
    with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 26), salt="s") as other:
        for serving, words in ((engine, "Ann has 3 red kites."), (other, "Ben has 7 blue cups.")):
            graph = ChoreoGraph(system="S.")
            graph.add_node("a", Agent("Alice", prompt="Check it.", sampling=SHORT)).add_edge(START, "a")
            graph.compile(saver, engine=serving).invoke({"messages": [("user", words)]}, config)
    texts = [text for text, _ in seen[-1][1]]
    asked = "<|user|> Check it.<|end|>"
    assert texts.count(asked) == 2 and texts.index(asked) == 2, "before its first answer, and again"


def test_plain_nodes_of_two_runs_are_no_siblings(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = ChoreoGraph(system="S.", positions="parallel")
    graph.add_node("z_first", lambda state: {"messages": [HumanMessage("Ann has 3 red kites.")]})
    graph.add_node("a_then", lambda state: {"messages": [HumanMessage("Add 1.")]})
    graph.add_node("reader", Agent("Bruno", sampling=SHORT, reads={"a_then": "shared", "z_first": "shared"}))
    route = lambda state: "a_then" if state.get("messages") else "z_first"  # noqa: E731
    graph.add_conditional_edges(START, route, ["a_then", "z_first"])
    graph.add_edge("z_first", END).add_edge("a_then", "reader")
    app = graph.compile(engine=engine)
    first = app.invoke({"messages": []})
    seen = views(monkeypatch)
    app.invoke({"messages": first["messages"]})
    [(_, (_, (one, at), (other, later)))] = seen
    assert "Ann" in one and "Add" in other and later > at


def test_a_tree_and_a_debate_run_inside_a_graph(engine: Engine) -> None:
    tree = tree_of_thoughts(branches=2, voters=2, depth=2, answer_prefix="I vote for", sampling=ROOMY)
    debate = iterative_debate(ROLES, verdicts=lambda _: [], go_on="Go on.", rounds=2, sampling=SHORT)
    for inner, last in ((tree, "finalist"), (debate, "moderator")):
        graph = ChoreoGraph()
        graph.add_node("team", inner.compile(engine=engine))
        graph.add_edge(START, "team").add_edge("team", END)
        state = graph.compile(engine=engine).invoke(FACT)
        assert state["handles"][-1]["author"] == f"team|{last}"


def test_a_second_question_on_a_thread_starts_anew(engine: Engine) -> None:
    names = {"Alice": "Always defect.", "Bob": "Do what the other says."}
    graphs = {
        "tree": tree_of_thoughts(branches=2, voters=1, depth=2, keep=2, answer_prefix="I vote for", sampling=ROOMY),
        "debate": iterative_debate(ROLES, verdicts=lambda _: [], go_on=" Go on. ", rounds=2, sampling=SHORT),
        "dilemma": prisoners_dilemma(names, game="G.", talks=1, decisions=["I defect."], sampling=SHORT),
    }
    for name, graph in graphs.items():
        app = graph.compile(InMemorySaver(), engine=engine)
        config, spoke = {"configurable": {"thread_id": "t"}}, []
        for number in range(2):
            state = app.invoke({"messages": [("user", f"Start at {number}.")]}, config)
            spoke.append([entry["author"] for entry in state["handles"]])
        assert spoke[1] == spoke[0] * 2, name
        if name == "dilemma":
            decided = [m.text for m in state["messages"] if m.name in ("alice", "bob")]
            assert decided.count("I defect.") >= 4 and decided[-2:] == ["I defect."] * 2


def test_a_removed_speech_is_no_error(engine: Engine) -> None:
    graph = iterative_debate(ROLES, verdicts=lambda _: [], go_on="Go on.", rounds=1, sampling=SHORT)
    app = graph.compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    state = app.invoke(FACT, config)
    app.update_state(config, {"messages": [RemoveMessage(id=state["messages"][1].id)]})
    state = app.invoke({"messages": [("user", "Start at 5.")]}, config)
    assert state["messages"][-1].text == "Go on."


def test_samples_of_one_instance_are_siblings(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = views(monkeypatch)
    worker = Worker("solver", n=3, sampling=Sampling(max_tokens=6, temperature=1.0))
    graph = ChoreoGraph(system="S.")
    graph.add_node(worker)
    graph.add_node("m", Synthesizer("M", merges=["solver"], strategy="parallel", sampling=SHORT))
    graph.add_edge(START, "solver").add_edge("solver", "m")
    graph.compile(engine=engine).invoke(FACT)
    offsets = [at for text, at in seen[-1][1] if "solver" in text]
    assert len(offsets) == 3 and len(set(offsets)) == 1


def test_a_failed_sample_leaves_nothing_of_the_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, calls = Engine.astream, []

    async def failing() -> AsyncIterator[Any]:
        await asyncio.sleep(0.3)  # the others are done by then
        raise RuntimeError("boom")
        yield

    def third_fails(self: Any, header: Any, parents: Any, **options: Any) -> Any:
        calls.append(1)
        return failing() if len(calls) % 3 == 0 else stream(self, header, parents, **options)

    graph = ChoreoGraph(system="S.")
    graph.add_node(Worker("solver", n=3, sampling=Sampling(max_tokens=3, temperature=3.0))).add_edge(START, "solver")
    app = graph.compile(engine=engine)
    monkeypatch.setattr(Engine, "astream", third_fails)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="boom"):
            app.invoke(FACT)
        assert not [message for message in engine._core.table.messages() if message.chosen]


def test_a_removed_input_is_not_found_again_in_another_nodes_words(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = views(monkeypatch)

    def secret(state: Any) -> Any:
        gone = [RemoveMessage(id=message.id) for message in state["messages"]]
        return {"messages": [*gone, HumanMessage("Ann has 3 red kites.")]}

    graph = ChoreoGraph(system="S.")
    graph.add_node("first", Agent("Alice", sampling=SHORT)).add_node("secret", secret)
    graph.add_node("reader", Agent("Bruno", sampling=SHORT))
    graph.add_edge(START, "first").add_edge("first", "secret").add_edge("secret", "reader", visibility="private")
    graph.set_visibility("first", "reader", "private")
    graph.compile(engine=engine).invoke(FACT)
    assert not any("Ann" in text for text, _ in seen[-1][1])


@pytest.mark.parametrize("choices", ["Yes.", ["Yes.", ""], [1, 2]])
def test_choices_that_are_none_are_refused(engine: Engine, choices: Any) -> None:
    graph = ChoreoGraph()
    graph.add_node("a", Agent("Alice", choices=choices, sampling=SHORT)).add_edge(START, "a")
    with pytest.raises(InvalidRequestError, match="choices of 'Alice'"):
        graph.compile(engine=engine).invoke(FACT)


def test_choices_have_no_spaces_around_them(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node("a", Agent("Alice", choices=[" Yes. "], sampling=SHORT)).add_edge(START, "a")
    assert graph.compile(engine=engine).invoke(FACT)["messages"][-1].text == "Yes."
