"""A router over several engines says what one engine says, wherever calls are run and however KV gets there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from choreo_ray.remote import EngineWorker, remote_engine
from choreo_ray.remote.routing import route
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from remote_support.loopback import Router, apart, encoding_apart, load_loopback

from choreo_agents import (
    START,
    Agent,
    ChoreoGraph,
    Decode,
    Engine,
    Memory,
    MessageHandle,
    Prefill,
    Sampling,
    compare,
)
from choreo_agents.errors import EngineMismatchError, InvalidRequestError, KVBudgetError
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import EventList, KVCopied, RequestRouted
from choreo_agents.workflows import debate
from choreo_agents.workflows.graphs.branch_solve_merge import branch_solve_merge
from choreo_agents.workflows.graphs.tree_of_thoughts import tree_of_thoughts

MEMORY = Memory(kv_budget_bytes=1 << 23)
WARM = Sampling(temperature=1.0, max_tokens=12, stop_tokens=())
LED = WARM.model_copy(update={"max_tokens": 120})
QUESTION = {"messages": [("user", "What does Ann have?")]}


class Boxes(BaseModel):
    boxes: Literal[3, 4, 5, 6]


def calling() -> ChoreoGraph:
    """Of two who read a third, one must call a tool, and one may, or answers in a form."""

    def count(of: Literal["kites", "boats"]) -> str:
        """Count all things."""
        return of

    graph = ChoreoGraph().add_node(Agent("cleo", sampling=WARM)).add_edge(START, "cleo")
    graph.add_node(Agent("ann", tools=[count], tool_choice="count", sampling=LED))
    graph.add_node(Agent("bob", tools=[count], response_format=Boxes, sampling=LED))
    return graph.add_edge("cleo", "ann").add_edge("cleo", "bob")


GRAPHS: dict[str, Any] = {
    "debate": lambda: debate({"alice": None, "bruno": None, "carla": None}, rounds=2, revise="Again.", sampling=WARM),
    "tree": lambda: tree_of_thoughts(branches=3, voters=2, depth=2, keep=2, system="Root.", sampling=WARM),
    "calls": calling,
    "parts": lambda: branch_solve_merge(["Write part 1.", "Write part 2."], plan="Plan.", merge="All.", sampling=WARM),
}
ROUTINGS = {"as it comes": route, "copied apart": apart, "encoded apart": encoding_apart}


def said(engine: Engine, graph: ChoreoGraph) -> list[tuple[str, str]]:
    """Who said what."""
    state = graph.compile(engine=engine).invoke(QUESTION)
    return [(e["author"], engine.text(MessageHandle.model_validate(e["handle"]))) for e in state["handles"]]


@pytest.fixture(scope="module")
def routers(embedded: LoadedModel) -> Iterator[dict[str, tuple[Router, EventList]]]:
    """One over one engine, and one over two for each way to place calls."""
    made: dict[str, tuple[Router, EventList]] = {}
    for name, routing in {"one engine": route, **ROUTINGS}.items():
        events = EventList()
        engines = 1 if name == "one engine" else 2
        made[name] = load_loopback(embedded, engines, memory=MEMORY, sink=events, routing=routing), events
    yield made
    for router, _ in made.values():
        router.check()
        router.close()


@pytest.fixture(scope="module")
def alone(embedded: LoadedModel) -> Iterator[Engine]:
    with Engine.load(embedded, memory=MEMORY) as engine:
        yield engine


@pytest.mark.parametrize("where", ["one engine", *ROUTINGS])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_says_the_same_wherever_its_calls_are_run(
    alone: Engine, routers: dict[str, tuple[Router, EventList]], name: str, where: str
) -> None:
    router, events = routers[where]
    events.events.clear()
    assert said(router, GRAPHS[name]()) == said(alone, GRAPHS[name]())
    placed = [event for event in events.events if isinstance(event, RequestRouted)]
    assert where == "as it comes" or len({event.engine for event in placed}) == (1 if where == "one engine" else 2)
    copied = [event for event in events.events if isinstance(event, KVCopied)]
    if where == "copied apart":
        assert sum(event.bytes for event in copied) > 0 and not any(event.refused for event in copied)
        assert sum(event.tokens_again for event in placed) == 0
        assert sum(event.bytes_copied for event in placed) >= sum(event.bytes for event in copied)
    if where == "encoded apart":
        assert not copied and sum(event.bytes_copied for event in placed) == 0
        assert sum(event.tokens_again for event in placed) > 0


def test_no_token_is_encoded_again_where_kv_is_copied(embedded: LoadedModel) -> None:
    events = EventList()
    router = load_loopback(embedded, memory=MEMORY, routing=apart, sink=events)
    try:
        first = router.prefill("Ann has 3 red kites. " * 8)
        second = router.prefill("Bob has none.", [first])
        answer = router.decode("So:", [second, first], [30, None], sampling=WARM)
        assert router.stats().tokens_recomputed == 0 and router.usage(answer).tokens_reused > 0
        per_token = embedded.adapter.geometry.bytes_per_token
        [*_, copied] = [event for event in events.events if isinstance(event, KVCopied)]
        assert copied.bytes % per_token == 0 and copied.bytes > 0
        router.check()
    finally:
        router.close()


@settings(max_examples=12)
@given(st.data())
def test_random_views_say_the_same_on_both(data: st.DataObject) -> None:
    random = data.draw(st.randoms(use_true_random=False))
    routing = data.draw(st.sampled_from([route, apart, encoding_apart]))
    model = _tiny()
    with Engine.load(model, memory=MEMORY, seed=3) as one:
        router = load_loopback(model, memory=MEMORY, seed=3, routing=routing)
        try:
            made: dict[Engine, list[Any]] = {one: [], router: []}
            for number in range(8):
                parents = random.sample(range(number), min(number, random.randint(0, 3)))
                places = [random.choice([None, random.randint(0, 40)]) for _ in parents]
                tokens = [random.randint(3, 90) for _ in range(random.randint(1, 12))]
                sampling = Sampling(temperature=random.choice([0.0, 1.0]), max_tokens=6, stop_tokens=())
                for engine, handles in made.items():
                    read = [handles[parent] for parent in parents]
                    if number % 2:
                        handles.append(engine.decode([Decode(tokens, read, places, sampling=sampling)])[0])
                    else:
                        handles.append(engine.prefill([Prefill(tokens, read, places)])[0])
            words = {engine: [engine.tokens(each) for each in handles] for engine, handles in made.items()}
            assert words[one] == words[router]
            router.check()
        finally:
            router.close()


_MODELS: list[LoadedModel] = []


@pytest.fixture(autouse=True)
def _loaded(tiny: LoadedModel) -> None:
    _MODELS[:] = [tiny]


def _tiny() -> LoadedModel:
    return _MODELS[0]


def test_what_is_released_leaves_the_engines_too(embedded: LoadedModel) -> None:
    router = load_loopback(embedded, memory=MEMORY, routing=apart)
    try:
        with router.scope():
            first = router.prefill("Ann has 3 red kites.")
            router.decode("So:", [first], sampling=WARM)
        kept = router.prefill("Kept.")
        router.text(kept)
        for engine in router.far:
            engine.admin.stats()
        left = sum(engine.admin.stats().messages for engine in router.far)
        for _ in range(200):
            if left == 1:
                break
            router.prefill("Kept.")  # lets what was released be told first
            router.release(kept)
            left = sum(engine.admin.stats().messages for engine in router.far)
        assert left == 1
    finally:
        router.close()


def test_engines_of_other_models_are_refused(tiny: LoadedModel, embedded: LoadedModel) -> None:
    with Engine.load(tiny) as one, Engine.load(embedded) as other:
        with pytest.raises(
            EngineMismatchError, match=r"engine 'b' serves .* engines of one router need the same model"
        ):
            remote_engine([EngineWorker(one, "a"), EngineWorker(other, "b")], tiny)
        with pytest.raises(InvalidRequestError, match="with different names"):
            remote_engine([EngineWorker(one, "a"), EngineWorker(one, "a")], tiny)
        with pytest.raises(InvalidRequestError, match="needs engines"):
            remote_engine([], tiny)
    with (
        Engine.load("embedded", dtype=torch.bfloat16) as half,
        Engine.load(embedded) as one,
        pytest.raises(EngineMismatchError, match="engines of one router need the same model and dtype"),
    ):
        remote_engine([EngineWorker(one, "a"), EngineWorker(half, "b")], embedded)
    with (
        Engine.load(tiny, method="baseline") as text,
        pytest.raises(EngineMismatchError, match="has a method without KV"),
    ):
        remote_engine([EngineWorker(text, "a")], tiny)


def test_what_the_smallest_of_them_has_no_room_for_is_refused(tiny: LoadedModel) -> None:
    small, large = (Memory(kv_budget_bytes=tokens * tiny.adapter.geometry.bytes_per_token) for tokens in (64, 512))
    with (
        Engine.load(tiny, memory=large) as one,
        Engine.load(tiny, memory=small) as other,
        remote_engine([EngineWorker(one, "a"), EngineWorker(other, "b")], tiny) as router,
    ):
        with pytest.raises(KVBudgetError):
            router.prefill([7] * 100)
        assert router.prefill([7] * 40).length == 40 and router.stats().messages == 1


def test_a_front_needs_no_weights(tiny_path: Any, tiny: LoadedModel) -> None:
    with Engine.load(tiny) as one:
        router = remote_engine([EngineWorker(one, "a")], tiny_path)
        with router, pytest.raises(InvalidRequestError, match="weights are on remote engines"):
            handle = router.decode([5, 6], sampling=WARM)
            assert router.tokens(handle) == one.tokens(one.decode([5, 6], sampling=WARM))
            router.model.adapter.logits([1], [0], None, [0])  # type: ignore[arg-type]
        assert router.model.adapter.fingerprint == tiny.adapter.fingerprint


def test_nothing_is_computed_with_a_fronts_model_in_this_process(tiny_path: Any, tiny: LoadedModel) -> None:
    """Neither by an engine over its model, nor by methods that a graph is compared under."""
    graph = ChoreoGraph().add_node(Agent("ann", sampling=WARM)).add_edge(START, "ann")
    with Engine.load(tiny) as one, remote_engine([EngineWorker(one, "a")], tiny_path) as router:
        with pytest.raises(InvalidRequestError, match=r"weights are on remote engines.* Load them with Engine.load"):
            Engine.load(router.model)
        with pytest.raises(InvalidRequestError, match=r"is remote: compile the graph with Engine.load"):
            compare(graph.compile(engine=router), ["What does Ann have?"], repeats=1)


def test_logits_do_not_leave_their_engine(embedded: LoadedModel) -> None:
    router = load_loopback(embedded, memory=MEMORY)
    try:
        with pytest.raises(InvalidRequestError, match="logits_callback needs an engine in this process"):
            router.decode([Decode("So:", logits_callback=torch.clone)])  # type: ignore[arg-type]
        assert router.stats().messages == 0
    finally:
        router.close()


def test_keys_and_values_are_not_in_this_process(embedded: LoadedModel) -> None:
    router = load_loopback(embedded, memory=MEMORY)
    try:
        handle = router.prefill("Ann has 3 red kites.")
        for _ in range(2):  # the first refusal leaves nothing that the next would wait for
            with pytest.raises(InvalidRequestError, match="use an engine in this process"):
                router.kv.read(handle)
        assert router.kv.tiers([handle]) == ["device"]
        assert router.decode("So:", [handle], sampling=WARM).length
    finally:
        router.close()
