"""Chat models in functions between secrets and readers: what is kept from a reader changes no bit of what it says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import langchain_choreo.chat_model
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from langchain_choreo import ChatChoreo
from langchain_core.messages import AIMessage, RemoveMessage, SystemMessage
from langgraph.graph import StateGraph
from langgraph.types import Send
from support import visible_graphs
from support.interference import WARN, changed, contexts_of, models, run, unreached
from support.tiny import save_tiny_llama
from support.visible_graphs import ECHO, LETTERS, SPEAKING, Forced, Speaker, Spec, specs

from choreo_agents import START, Agent, ChoreoGraph, ChoreoState, Engine, MessageHandle, Policy, VisibilityRule
from choreo_agents.errors import LineageWarning, VisibilityError
from choreo_agents.models import load_model
from choreo_agents.runtime.step_trace import StepTrace

pytestmark = [
    pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning"),
    pytest.mark.filterwarnings("ignore::choreo_agents.errors.LineageWarning"),
]
Load = Callable[..., Engine]
READS: dict[str, Any] = {"ann": {}, "cleo": {"ann": "private", "team": "shared"}}


@pytest.fixture(scope="module", autouse=True)
def _model(tmp_path_factory: pytest.TempPathFactory) -> None:
    models["tiny"] = load_model(save_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """Loads the engine of a run, whose function asks it: all words of the state are in its prompt, and its words are
    always the same."""
    with pytest.MonkeyPatch.context() as patch:
        request_of = langchain_choreo.chat_model.request_of

        def forced(*args: Any, **more: Any) -> Any:
            request = request_of(*args, **more)
            tokens = tuple(LETTERS[(3 * request.sampling.seed + at) % len(LETTERS)] for at in range(3))
            sampling = request.sampling.model_copy(update={"forced_token_ids": tokens, "stop_tokens": ()})
            return replace(request, sampling=sampling)

        patch.setattr(langchain_choreo.chat_model, "request_of", forced)

        def loaded(*args: Any, **more: Any) -> Engine:
            engine = Engine.load(*args, **more)
            chat = ChatChoreo(engine=engine, seed=0)

            def asking(state: Any) -> Any:
                told = [SystemMessage("Tell."), *state["messages"]]
                return {"messages": [chat.invoke(told, seed=state.get("rounds", 0))]}

            patch.setattr(visible_graphs, "mutter", asking)
            return engine

        yield loaded


def between(*, confidential: bool = True, **rules: str) -> Spec:
    """ann has a secret; a function says what it makes of all; bob reads that, then cleo may read bob."""
    speakers = (
        Speaker("ann", "ann", True, False, confidential),
        Speaker("bob", "bob", True, False, False),
        Speaker("cleo", "cleo", False, False, False),
    )
    table = {
        (source, reader): VisibilityRule(mode) for pair, mode in rules.items() for source, reader in [pair.split("_")]
    }
    return Spec(speakers, table, (("ann",), (ECHO,), ("bob",), ("cleo",)), 1)


def bits(spec: Spec, load: Load, name: str) -> bool:
    """Whether a reader's distributions change with ann's words."""
    step_trace = StepTrace()
    one, _, _ = run(spec, Forced(1), step_trace, echoing=False, load=load)
    two, _, _ = run(spec, Forced(1, frozenset({"ann"})), step_trace.replay(), echoing=False, load=load)
    [key] = [key for key in one if key[0] == name]
    return one[key] != two[key]


def test_what_a_function_has_asked_carries_what_nothing_keeps_from_its_readers(load: Load) -> None:
    """The comparison can fail: where nothing forbids it, bits go through the function's answer."""
    spec = between(confidential=False, echo_bob="shared", bob_cleo="shared")
    assert bits(spec, load, "bob") and bits(spec, load, "cleo")
    shown = between(echo_bob="shared", ann_cleo="reencoded", bob_cleo="private", echo_cleo="shared")
    assert bits(shown, load, "cleo") and not bits(shown, load, "bob")
    assert "ann" in shown.graph(WARN).audit().reached("cleo", "encoding")


def test_attack_a_private_source_does_not_come_through_a_functions_answer(load: Load) -> None:
    cases: list[dict[str, Any]] = [
        {"ann_bob": "private", "echo_bob": "shared"},
        {"ann_cleo": "private", "echo_bob": "shared", "bob_cleo": "shared"},
        {"echo_bob": "reencoded"},
    ]
    for rules in (*cases, *({**case, "confidential": False} for case in cases)):
        spec, reader = between(**rules), "cleo" if "ann_cleo" in rules else "bob"
        assert "ann" not in spec.graph(WARN).audit().reached(reader, "encoding")
        spec.graph().audit()
        assert not bits(spec, load, reader), f"ann reached {reader}, with {rules}"


def test_attack_nor_does_what_a_policy_keeps_to_itself(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = between(confidential=True, echo_bob="shared")
    policy = WARN.model_copy(update={"confidential": {"ann": frozenset()}})
    graph = Spec.graph
    monkeypatch.setattr(Spec, "graph", lambda self, _=None, **more: graph(self, policy, **more))
    assert not bits(spec, load, "bob")


def test_the_reader_is_told_by_name(load: Load) -> None:
    spec = between(ann_bob="private", echo_bob="shared")
    with pytest.warns(LineageWarning, match="'bob' reads the text instead of the KV of 'echo'"):
        run(spec, Forced(1), echoing=False, load=load)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LineageWarning)
        run(between(confidential=False, echo_bob="shared"), Forced(1), echoing=False, load=load)


@given(specs(), st.integers(0, 99), st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_visibility_non_interference_of_encodings_through_functions(
    load: Load, spec: Spec, seed: int, data: st.DataObject
) -> None:
    """What cannot reach a reader as an encoding changes no bit of its distributions, if all words stay."""
    assume(any(ECHO in layer for layer in spec.layers))
    report = spec.graph(WARN).audit()
    context = data.draw(st.sampled_from(contexts_of(spec, report)))
    readers = unreached(spec, report, context, "encoding")
    assume(readers)
    other, authors = changed(spec, context)
    step_trace = StepTrace()
    one, _, found = run(spec, Forced(seed), step_trace, echoing=False, load=load)
    two, _, _ = run(other, Forced(seed, authors), step_trace.replay(), echoing=False, load=load)
    known = {(each.context, each.reader, each.channel) for each in report.findings}
    assert {(each.context, each.reader, each.channel) for each in found.findings} <= known, "not foreseen"
    for key in one:
        if key[0] in readers:
            assert one[key] == two[key], f"{context} reached {key}"


@pytest.mark.parametrize("around", ["ours", "LangGraph's"])
def test_attack_what_a_graph_around_keeps_from_its_readers_is_kept_inside(around: str) -> None:
    """A team's function reads what was said outside, and its agent that function: who reads the team gets words of it,
    or, where nobody knows beforehand, the call fails."""
    with Engine.load(models["tiny"]) as engine:
        chat = ChatChoreo(engine=engine, max_tokens=3, seed=0)
        team = ChoreoGraph()
        team.add_node("asks", lambda state: {"messages": [chat.invoke(state["messages"])]}).add_edge(START, "asks")
        team.add_node(Agent("bob", sampling=SPEAKING)).add_edge("asks", "bob", visibility="shared")
        ann, cleo = (Agent(name, sampling=SPEAKING, engine=engine, reads=reads) for name, reads in READS.items())
        graph: Any = ChoreoGraph() if around == "ours" else StateGraph(ChoreoState)
        graph.add_node("ann", ann).add_node("team", team.compile(engine=engine)).add_node("cleo", cleo)
        graph.add_edge(START, "ann").add_edge("team", "cleo")
        if around == "ours":
            shared = graph.with_policy(Policy()).add_edge("ann", "team")
            with pytest.raises(VisibilityError, match="'ann' is declared private to 'cleo'"):
                shared.compile(engine=engine)  # the edge gives the team what is kept from cleo
        graph.add_edge("ann", "team", **({"visibility": {}} if around == "ours" else {}))
        app = graph.compile(engine=engine) if around == "ours" else graph.compile()
        asked: Any = {"messages": [("user", "Where are the kites?")]}
        said_by, reader = (r"team\|asks", r"team\|bob") if around == "ours" else (r"team\|bob", "cleo")
        with pytest.warns(LineageWarning, match=f"'{reader}' reads the text instead of the KV of .*'{said_by}'"):
            app.invoke(asked)


def test_attack_a_function_invokes_a_graph_that_asks(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is that of a node in there, and what is kept from a reader of the function is kept all the same."""

    def loaded(*args: Any, **more: Any) -> Engine:
        engine = load(*args, **more)
        inner = StateGraph(ChoreoState).add_node("asks", visible_graphs.mutter).add_edge(START, "asks").compile()

        def invoking(state: Any) -> Any:
            said = inner.invoke({"messages": state["messages"], "rounds": state.get("rounds", 0)})
            return {"messages": said["messages"][-1:]}

        monkeypatch.setattr(visible_graphs, "mutter", invoking)
        return engine

    assert bits(between(confidential=False, echo_bob="shared"), loaded, "bob"), "it can fail"
    assert not bits(between(ann_bob="private", echo_bob="shared"), loaded, "bob")
    assert not bits(between(confidential=True, echo_bob="shared"), loaded, "bob")


def test_attack_the_answer_that_somebody_attended_to_is_removed() -> None:
    """In a stock graph nobody knows who is to read what comes of it: who is kept from ann reads words of bob."""
    with Engine.load(models["tiny"]) as engine:
        chat = ChatChoreo(engine=engine, max_tokens=3, seed=0)
        reads: dict[str, Any] = {"ann": {}, "bob": {"echo": "shared"}, "cleo": {"ann": "private", "bob": "shared"}}
        ann, bob, cleo = (Agent(name, sampling=SPEAKING, engine=engine, reads=reads[name]) for name in reads)
        graph = StateGraph(ChoreoState).add_node("ann", ann).add_node("bob", bob).add_node("cleo", cleo)
        graph.add_node("echo", lambda state: {"messages": [chat.invoke(state["messages"])]})
        graph.add_node("trim", lambda state: {"messages": [RemoveMessage(state["messages"][2].id)]})
        for source, reader in pairwise([START, "ann", "echo", "bob", "trim", "cleo"]):
            graph.add_edge(source, reader)
        with pytest.warns(LineageWarning, match="'cleo' reads the text instead of the KV of 'bob'"):
            state = graph.compile().invoke({"messages": [("user", "Where are the kites?")]})
        assert [message.type for message in state["messages"]] == ["human", "ai", "ai", "ai"]
        [asked] = [each for each in state["handles"] if each["author"] == "cleo"]
        bobs = next(each for each in state["handles"] if each["author"] == "bob")["handle"]["id"]
        ancestors = engine.inspect.ancestors(MessageHandle.model_validate(asked["handle"]))
        assert bobs not in {each.id for each in ancestors}


ASKED: Any = {"messages": [("user", "Where are the kites?")]}


def attends(engine: Engine, state: Any, reader: str, answers: Sequence[AIMessage] = ()) -> bool:
    """Whether a reader's last message has attended to an answer: one of these, or that in the state."""
    answers = answers or [m for m in state["messages"] if "encoded" in m.response_metadata.get("choreo", {})]
    said = [entry["handle"] for entry in state["handles"] if entry["author"] == reader][-1]
    ancestors = {each.id for each in engine.inspect.ancestors(MessageHandle.model_validate(said))}
    return any(answer.response_metadata["choreo"]["handle"] in ancestors for answer in answers)


@pytest.mark.parametrize("confidential", [True, False])
def test_attack_what_a_route_of_an_agents_node_asks_is_not_the_agents(confidential: bool) -> None:
    """Zoe is kept from ann, and the route, which stands in ann's node, reads all."""
    with Engine.load(models["tiny"]) as engine:
        chat, answers = ChatChoreo(engine=engine, max_tokens=3, seed=0), list[AIMessage]()

        def route(state: Any) -> Any:
            answers.append(chat.invoke(state["messages"]))
            return [Send("bob", {**state, "messages": [*state["messages"], *answers]})]

        graph = ChoreoGraph().add_node(Agent("zoe", sampling=SPEAKING, confidential=confidential))
        graph.add_node(Agent("ann", sampling=SPEAKING)).add_node(Agent("bob", sampling=SPEAKING))
        graph.add_edge(START, "zoe").add_edge("zoe", "ann", visibility="private")
        app = graph.add_conditional_edges("ann", route, ["bob"]).compile(engine=engine)
        with pytest.warns(LineageWarning, match="'bob' reads the text instead of the KV of 'ann'"):
            state = app.invoke(ASKED)
        assert not attends(engine, state, "bob", answers)


def answered_between(engine: Engine, confidential: bool, **readers: Agent) -> Any:
    """A stock graph: ann, a function that asks, readers side by side or, if they are told so, one by one."""
    chat = ChatChoreo(engine=engine, max_tokens=3, seed=0)
    graph = StateGraph(ChoreoState).add_node(
        "ann", Agent("ann", engine=engine, confidential=confidential, sampling=SPEAKING)
    )
    graph.add_node("echo", lambda state: {"messages": [chat.invoke(state["messages"])]})
    for name, reader in readers.items():
        graph.add_node(name, reader)
    return graph.add_edge(START, "ann").add_edge("ann", "echo")


@pytest.mark.parametrize("first", ["bob", "eve"])
def test_attack_another_models_encoding_of_the_words_is_no_answer(first: str) -> None:
    """Who reads words alone makes an entry of them, into which the answer's encoding is put side by side."""
    other = load_model("embedded")
    with Engine.load(models["tiny"], salt="a salt of both") as engine, Engine.load(other, salt="a salt of both") as far:
        a, b = ("a", "b") if first == "bob" else ("b", "a")
        bob = Agent(a, engine=engine, reads={"echo": "shared"}, sampling=SPEAKING)
        eve = Agent(b, engine=far, reads={"echo": "shared"}, sampling=SPEAKING)
        dan = Agent("dan", engine=engine, reads={"echo": "shared", "ann": "private"}, sampling=SPEAKING)
        graph = answered_between(engine, False, **{a: bob, b: eve, "dan": dan})
        app = graph.add_edge("echo", "a").add_edge("echo", "b").add_edge(["a", "b"], "dan").compile()
        state = app.invoke(ASKED)
        assert attends(engine, state, a) and not attends(engine, state, "dan")


@pytest.mark.parametrize("reads", [{"echo": "shared"}, {"*": "shared"}])
def test_attack_somebodys_confidential_message_does_not_come_along_in_a_stock_graph(reads: dict[str, str]) -> None:
    with Engine.load(models["tiny"]) as engine:
        bob = Agent("bob", engine=engine, reads=reads, sampling=SPEAKING)
        app = answered_between(engine, True, bob=bob).add_edge("echo", "bob").compile()
        with pytest.warns(LineageWarning, match="'bob' reads the text"):
            assert not attends(engine, app.invoke(ASKED), "bob")


@pytest.mark.parametrize("order", [("bob", "cleo"), ("cleo", "bob")])
def test_an_answer_is_input_to_who_does_not_declare_its_function(order: tuple[str, str]) -> None:
    """In whatever order: one attends to it, the other reads its words as before."""
    with Engine.load(models["tiny"]) as engine:
        bob = Agent("bob", engine=engine, reads={"echo": "shared"}, sampling=SPEAKING)
        graph = answered_between(engine, False, bob=bob, cleo=Agent("cleo", engine=engine, sampling=SPEAKING))
        app = graph.add_edge("echo", order[0]).add_edge(*order).compile()
        with warnings.catch_warnings():
            warnings.simplefilter("error", LineageWarning)
            state = app.invoke(ASKED)
        assert attends(engine, state, "bob") and not attends(engine, state, "cleo")
        words = next(m.text for m in state["messages"] if m.response_metadata.get("choreo", {}).get("author") == "echo")
        said = [entry["handle"] for entry in state["handles"] if entry["author"] == "cleo"][-1]
        assert any(words in engine.text(each) for each in engine.inspect.ancestors(MessageHandle.model_validate(said)))


def test_who_declares_words_is_not_told_that_it_reads_words() -> None:
    with Engine.load(models["tiny"]) as engine:
        bob = Agent("bob", engine=engine, reads={"echo": "reencoded", "ann": "private"}, sampling=SPEAKING)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LineageWarning)
            answered_between(engine, False, bob=bob).add_edge("echo", "bob").compile().invoke(ASKED)
