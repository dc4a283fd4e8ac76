"""Workers with instructions of their own over one trunk, and what merges their branches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import HoldSteps, MakeEngine
from langchain_core.messages import AIMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.types import interrupt
from support.graphs import FREE, QUESTION, SHORT, agent
from support.lineage import parents_of, record_of
from support.stepping import until

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
    Synthesizer,
    Worker,
    send,
)
from choreo_agents.errors import AdapterError, ContextLengthError, InvalidRequestError

TOLD = {"Alice": "Write part 1.", "Bruno": "Write part 2.", "Clara": "Write part 3."}


def team(worker: Worker, told: dict[str, str] | None = None, *readers: Any) -> ChoreoGraph:
    """One instance for each speaker, then whoever reads them."""
    told = TOLD if told is None else told
    graph = ChoreoGraph(system="Root.")
    graph.add_node(worker)
    graph.add_conditional_edges(
        START,
        lambda state: [worker.send(state, text, speaker=name) for name, text in told.items()],
        [worker.name],
    )
    for reader in readers:
        graph.add_node(reader)
        graph.add_edge(worker.name, reader.name)
    return graph


def entries(state: dict[str, Any], author: str = "worker") -> list[Any]:
    return [entry for entry in state["handles"] if entry["author"] == author]


def handles(state: dict[str, Any], author: str = "worker") -> list[MessageHandle]:
    return [MessageHandle.model_validate(entry["handle"]) for entry in entries(state, author)]


def parents(engine: Engine, handle: MessageHandle) -> list[MessageHandle]:
    return [parent.handle for parent in parents_of(engine, handle)]


def offsets(engine: Engine, handle: MessageHandle) -> list[int]:
    """Where a message saw its parents, the first of them at 0, and where it stands itself."""
    record = record_of(engine, handle)
    return [offset - record.offsets[0] for offset in (*record.offsets, record.position)]


def texts(engine: Engine, given: list[MessageHandle]) -> list[str]:
    return [engine.text(handle) for handle in given]


# Workers


def test_instances_share_a_trunk_and_have_their_own_instruction_and_speaker(engine: Engine) -> None:
    worker = Worker("worker", system="Notes: Ann has 3 red kites.", sampling=FREE)
    state = team(worker).compile(engine=engine).invoke(QUESTION)
    said = handles(state)
    views = [parents(engine, handle) for handle in said]
    trunk = views[0][:-1]
    assert [view[:-1] for view in views] == [trunk] * 3
    assert texts(engine, trunk) == [
        engine.chat.root("Root.").text,
        engine.chat.turn("system", "Notes: Ann has 3 red kites.").text,
        engine.chat.turn("user", "What does Ann have?").text,
    ]
    assert texts(engine, [view[-1] for view in views]) == [
        engine.chat.turn("user", told).text for told in TOLD.values()
    ]
    assert [
        text.startswith(engine.chat.header(name).text) for text, name in zip(texts(engine, said), TOLD, strict=True)
    ]
    assert all(
        text.startswith(engine.chat.header(name).text) for text, name in zip(texts(engine, said), TOLD, strict=True)
    )
    once = {*trunk, *(view[-1] for view in views), *said}
    assert engine.stats().tokens_encoded == sum(handle.length for handle in once), "the trunk is encoded once"
    assert len({handle.id for handle in said}) == 3 and all(
        message.name == "worker" for message in state["messages"][1:]
    )


def test_no_instance_sees_another_or_what_it_was_asked(engine: Engine) -> None:
    state = team(Worker("worker", sampling=FREE), TOLD, agent("judge")).compile(engine=engine).invoke(QUESTION)
    asked = {MessageHandle.model_validate(entry["prompt"]) for entry in entries(state)}
    assert len(asked) == 3
    for handle in handles(state):
        assert len(asked & {*engine.inspect.ancestors(handle)}) == 1 and not {*handles(state)} & {
            *engine.inspect.ancestors(handle)
        }
    [judge] = handles(state, "judge")
    assert not asked & {*parents(engine, judge)} and {*handles(state)} <= {*parents(engine, judge)}


@pytest.mark.parametrize("sync", [True, False])
def test_one_view_is_sampled_several_times(engine: Engine, sync: bool) -> None:
    app = team(Worker("worker", n=3, sampling=FREE), {"Alice": "Write part 1."}).compile(engine=engine)
    state = app.invoke(QUESTION) if sync else asyncio.run(app.ainvoke(QUESTION))
    said = entries(state)
    assert [entry["call"] for entry in said] == [0, 1, 2] and {entry["superstep"] for entry in said} == {1}
    assert [message.id for message in state["messages"][1:]] == [entry["message_id"] for entry in said]
    assert len({tuple(engine.tokens(handle)) for handle in handles(state)}) == 3
    assert len({tuple(parents(engine, handle)) for handle in handles(state)}) == 1
    assert engine.stats().rows_per_decode_step > 2, "they are one batch"


def test_a_sample_does_not_depend_on_who_shares_its_batch(make_engine: MakeEngine) -> None:
    def said(n: int, told: dict[str, str]) -> list[list[int]]:
        engine = make_engine()
        state = team(Worker("worker", n=n, sampling=FREE), told).compile(engine=engine).invoke(QUESTION)
        return [engine.tokens(handle) for handle in handles(state)]

    whole = said(3, TOLD)
    assert said(2, TOLD) == [each for place, each in enumerate(whole) if place % 3 < 2]
    assert said(1, {"Alice": TOLD["Alice"]}) == whole[:1]
    assert len({tuple(each[-8:]) for each in whole}) == 9, "all draw from seeds of their own"


def test_readers_see_instances_in_the_order_of_their_sends(engine: Engine) -> None:
    worker = Worker("worker", n=2, sampling=FREE)
    told = {"Zoe": "Write part 1.", "Mia": "Write part 2.", "Abe": "Write part 3."}
    state = team(worker, told, agent("judge")).compile(engine=engine).invoke(QUESTION)
    assert [(entry["branch"], entry["call"]) for entry in entries(state)] == [
        (b, c) for b in range(3) for c in range(2)
    ]
    [judge] = handles(state, "judge")
    seen = [text for text in texts(engine, parents(engine, judge)) if "assistant" in text]
    speakers = [next(name for name in told if text.startswith(engine.chat.header(name).text)) for text in seen]
    assert speakers == ["Zoe", "Zoe", "Mia", "Mia", "Abe", "Abe"]
    assert [each for each in parents(engine, judge) if each in handles(state)] == handles(state)


def test_without_a_send_it_is_asked_its_own_prompt(engine: Engine) -> None:
    async def made(state: Any) -> str:
        return f"Answer {len(state['messages'])}."

    for prompt, asked in (("Answer.", "Answer."), (lambda state: "Answer it.", "Answer it."), (made, "Answer 1.")):
        graph = ChoreoGraph(system="Root.")
        graph.add_node("solver", Worker("Solver", prompt=prompt, speaker="Alice", sampling=SHORT))
        graph.add_edge(START, "solver")
        state = graph.compile(engine=engine).invoke(QUESTION)
        [said] = handles(state, "solver")
        assert engine.text(parents(engine, said)[-1]) == engine.chat.turn("user", asked).text
        assert engine.text(said).startswith(engine.chat.header("Alice").text)


def test_a_send_without_an_instruction_asks_its_own_prompt(engine: Engine) -> None:
    worker = Worker("Solver", prompt="Answer.", sampling=SHORT)
    graph = ChoreoGraph(system="Root.")
    graph.add_node("solver", worker)
    told = [None, "Answer it."]
    graph.add_conditional_edges(
        START, lambda state: [worker.send(state, each, node="solver") for each in told], ["solver"]
    )
    state = graph.compile(engine=engine).invoke(QUESTION)
    asked = [engine.text(parents(engine, handle)[-1]) for handle in handles(state, "solver")]
    assert asked == [engine.chat.turn("user", "Answer.").text, engine.chat.turn("user", "Answer it.").text]
    assert all(text.startswith(engine.chat.header("Solver").text) for text in texts(engine, handles(state, "solver")))


def test_a_worker_says_at_least_one_message() -> None:
    with pytest.raises(InvalidRequestError, match="at least 1, not 0"):
        Worker("worker", n=0)


def stock(engine: Engine) -> Any:
    """Workers, a judge and a synthesizer in LangGraph's own graph."""
    worker = Worker("worker", n=2, engine=engine, shared_system="Root.", sampling=FREE)
    graph = StateGraph(ChoreoState)
    graph.add_node("worker", worker)
    graph.add_node(
        "merger", Synthesizer("Merger", merges=["worker"], engine=engine, shared_system="Root.", sampling=SHORT)
    )
    graph.add_conditional_edges(
        START, lambda state: [worker.send(state, text, speaker=name) for name, text in TOLD.items()], ["worker"]
    )
    graph.add_edge("worker", "merger")
    return graph


@pytest.mark.parametrize("sync", [True, False])
def test_both_work_in_a_stock_state_graph(engine: Engine, sync: bool) -> None:
    app = stock(engine).compile()
    state = app.invoke(QUESTION) if sync else asyncio.run(app.ainvoke(QUESTION))
    assert [(entry["branch"], entry["call"]) for entry in entries(state)] == [
        (b, c) for b in range(3) for c in range(2)
    ]
    [merged] = handles(state, "merger")
    question = engine.chat.turn("user", "What does Ann have?").text
    assert texts(engine, parents(engine, merged)[:2]) == [engine.chat.root("Root.").text, question]
    assert parents(engine, merged)[2:] == handles(state), "the input stands before what was said about it"
    assert engine.text(merged).startswith(engine.chat.header("Merger").text)


def test_words_that_were_removed_and_said_again_stand_where_they_were_said_last(engine: Engine) -> None:
    graph = StateGraph(ChoreoState)
    graph.add_node("pro", agent("pro", engine=engine))
    graph.add_edge(START, "pro")
    app = graph.compile(InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    first = app.invoke(QUESTION, config)["messages"][0]
    app.invoke({"messages": [("user", "And Bob?")]}, config)
    app.update_state(config, {"messages": [RemoveMessage(str(first.id))]})
    state = app.invoke(QUESTION, config)
    said = handles(state, "pro")
    seen = parents(engine, said[-1])
    assert [engine.text(handle) for handle in (seen[-1], seen[-3])] == [
        engine.chat.turn("user", words).text for words in ("What does Ann have?", "And Bob?")
    ]


def test_a_rerun_after_an_interrupt_finds_all_its_answers(engine: Engine) -> None:
    speaker = Worker("worker", n=3, engine=engine, sampling=FREE)
    said: list[list[str]] = []

    async def node(state: ChoreoState, config: Any) -> dict[str, Any]:
        update = await speaker.ainvoke(state, config)
        said.append([entry["handle"]["id"] for entry in update["handles"] if entry["author"] != START])
        interrupt("may they be published?")
        return update

    graph = StateGraph(ChoreoState)
    graph.add_node("worker", _with_config(node))
    graph.add_edge(START, "worker")
    app = graph.compile(InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}

    async def run() -> int:
        await app.ainvoke(QUESTION, config)
        steps = engine.stats().steps
        await app.ainvoke(Command(resume=True), config)
        return engine.stats().steps - steps

    assert asyncio.run(run()) == 0
    assert said[0] == said[1] and len(set(said[0])) == 3
    assert len(entries(app.get_state(config).values)) == 3


def test_a_failed_branch_is_run_again_and_the_others_keep_what_they_said(engine: Engine) -> None:
    """With a checkpointer, what the branches said that did not fail is stored; the failed one finds its own answers."""
    failures = iter([True])
    worker = Worker("worker", n=2, engine=engine, sampling=FREE)

    async def node(state: Any, config: Any) -> dict[str, Any]:
        update = await worker.ainvoke(state, config)
        await asyncio.sleep(0.05 if state["choreo_speaker"] == "Bruno" else 0)
        if state["choreo_speaker"] == "Bruno" and next(failures, False):
            raise ValueError("once")
        return update

    graph = StateGraph(ChoreoState)
    graph.add_node("worker", _with_config(node))
    graph.add_conditional_edges(
        START, lambda state: [worker.send(state, text, speaker=name) for name, text in TOLD.items()], ["worker"]
    )
    app = graph.compile(InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}

    async def run() -> tuple[int, dict[str, Any]]:
        with pytest.raises(ValueError, match="once"):
            await app.ainvoke(QUESTION, config)
        steps = engine.stats().steps
        return steps, await app.ainvoke(None, config)

    steps, state = asyncio.run(run())
    assert engine.stats().steps == steps, "no token is decoded again"
    assert [(entry["branch"], entry["call"]) for entry in entries(state)] == [
        (b, c) for b in range(3) for c in range(2)
    ]


def _with_config(node: Any) -> Any:
    """LangGraph hands a node its config if the parameter says so by its type."""
    from langchain_core.runnables import RunnableConfig

    node.__annotations__["config"] = RunnableConfig
    return node


def test_each_sample_can_be_replayed(make_engine: MakeEngine) -> None:
    first = make_engine()
    worker = Worker("worker", n=3, sampling=FREE)
    told = {"Alice": "Write part 1.", "Bruno": "Write part 2."}
    state = team(worker, told).compile(engine=first).invoke(QUESTION)
    replay: dict[Any, Any] = {}
    for entry, handle in zip(entries(state), handles(state), strict=True):
        header = first.model.encode(first.chat.header("Alice" if entry["branch"] == 0 else "Bruno"))
        forced = first.tokens(handle)[len(header) :][:4]
        replay["worker", entry["superstep"], entry["branch"], entry["call"]] = (*forced[::-1], entry["call"] + 5)
    replay["worker", 1, 1, 2] = None  # this one decodes freely
    second = make_engine()
    again = (
        team(worker, told)
        .compile(engine=second)
        .invoke(QUESTION, {"configurable": {"choreo": RunOptions(replay=replay)}})
    )
    for entry, handle in zip(entries(again), handles(again), strict=True):
        forced = replay["worker", entry["superstep"], entry["branch"], entry["call"]]
        chosen = tuple(each.token for each in second.logprobs(handle))
        assert (
            chosen == forced
            if forced is not None
            else chosen == tuple(c.token for c in first.logprobs(handles(state)[-1]))
        )


async def test_if_one_sample_fails_the_others_stop(engine: Engine) -> None:
    worker = Worker("worker", n=3, engine=engine, sampling=Sampling(max_tokens=300, stop_tokens=()))
    replay = {("worker", 1, 0, 0): None, ("worker", 1, 0, 2): None}  # the second is missing
    graph = StateGraph(ChoreoState)
    graph.add_node("worker", worker)
    graph.add_edge(START, "worker")
    with pytest.raises(KeyError):
        await graph.compile().ainvoke(QUESTION, {"configurable": {"choreo": RunOptions(replay=replay)}})
    await until(lambda: not engine.stats().unfinished)
    stats = engine.stats()
    assert stats.decode_steps < 100 and stats.messages == 2, "root and question only"


async def test_cancelling_a_node_cancels_all_its_samples(engine: Engine, hold_steps: HoldSteps) -> None:
    worker = Worker("worker", n=3, engine=engine, sampling=Sampling(max_tokens=400, stop_tokens=()))
    graph = StateGraph(ChoreoState)
    graph.add_node("worker", worker)
    graph.add_edge(START, "worker")
    steps = hold_steps(engine)
    task = asyncio.create_task(graph.compile().ainvoke(QUESTION))
    while engine.stats().decode_steps < 4:
        await steps.amake(1)
    task.cancel()
    await asyncio.sleep(0)
    steps.go_on()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not engine.stats().unfinished)
    assert engine.stats().cancelled == 3 and engine.stats().messages == 2


def test_a_view_that_is_too_long_is_explained_with_several_samples_too(engine: Engine) -> None:
    long = {"messages": [("user", "Ann " * 900)]}
    worker = Worker("worker", n=2, sampling=Sampling(max_tokens=200))
    with pytest.raises(ContextLengthError, match=r"In the view of 'worker', \d+ tokens are input: send less"):
        team(worker, {"Alice": "Write."}).compile(engine=engine).invoke(long)


# The synthesizer


def merged_by(engine: Engine, merges: Any, **options: Any) -> dict[str, Any]:
    """alice, bruno and zoe say something of unequal length at once; the merger reads them as told."""
    graph = ChoreoGraph(system="Root.")
    for length, name in enumerate(("alice", "bruno", "zoe"), start=3):
        sampling = Sampling(max_tokens=3 * length, stop_tokens=(), temperature=1.0, seed=length)
        graph.add_node(agent(name, system=f"Notes of {name}.", sampling=sampling))
        graph.add_edge(START, name)
    graph.add_node(
        Synthesizer("merger", merges=merges, prompt="Write all parts again.", sampling=SHORT_WARM, **options)
    )
    graph.add_edge(["alice", "bruno", "zoe"], "merger", visibility={})
    return graph.compile(engine=engine).invoke(QUESTION)


SHORT_WARM = Sampling(max_tokens=8, stop_tokens=(), temperature=1.0, seed=1)


def by_hand(engine: Engine, view: list[MessageHandle], places: list[int], end: int) -> list[int]:
    """The same call, made on the engine alone: `end` is where what the merger is asked stands."""
    asked = engine.prefill(engine.chat.turn("user", "Write all parts again."), view, places, end)
    return engine.tokens(
        engine.decode(
            engine.chat.header("merger"),
            [*view, asked],
            [*places, end],
            end + asked.length,
            sampling=SHORT_WARM,
            turn_suffix=engine.chat.turn_end,
        )
    )


def trunk_of(engine: Engine) -> list[MessageHandle]:
    root = engine.prefill(engine.chat.root("Root."))
    return [root, engine.prefill(engine.chat.turn("user", "What does Ann have?"), [root])]


def after_each_other(view: list[MessageHandle]) -> list[int]:
    return [sum(handle.length for handle in view[:place]) for place in range(len(view) + 1)]


def test_branches_stand_in_the_stated_order_one_after_the_other(engine: Engine) -> None:
    state = merged_by(engine, ["zoe", "alice", "bruno"])
    [merged] = handles(state, "merger")
    view = [*trunk_of(engine), *(handles(state, name)[0] for name in ("zoe", "alice", "bruno"))]
    assert parents(engine, merged)[:-1] == view
    places = after_each_other(view)
    assert offsets(engine, merged)[:-1] == places
    assert engine.tokens(merged) == by_hand(engine, view, places[:-1], places[-1])


def test_parallel_branches_stand_at_one_offset(engine: Engine) -> None:
    state = merged_by(engine, ["zoe", "alice", "bruno"], strategy="parallel")
    [merged] = handles(state, "merger")
    trunk = trunk_of(engine)
    branches = [handles(state, name)[0] for name in ("zoe", "alice", "bruno")]
    start = sum(handle.length for handle in trunk)
    end = start + max(handle.length for handle in branches)
    assert len({handle.length for handle in branches}) == 3
    assert parents(engine, merged)[:-1] == [*trunk, *branches]
    places = [0, trunk[0].length, start, start, start]
    assert offsets(engine, merged)[:-1] == [*places, end]
    assert engine.tokens(merged) == by_hand(engine, [*trunk, *branches], places, end)


def test_a_parallel_branch_that_has_not_read_input_is_not_moved_behind_it(engine: Engine) -> None:
    """The other branches stand behind it, also the one that has read it in an encoding of its own."""
    graph = ChoreoGraph(system="Root.")
    for name, reads in (("alice", "private"), ("bruno", "shared"), ("cleo", "reencoded")):
        graph.add_node(agent(name, system=f"{name} has notes.", sampling=SHORT)).add_edge(START, name, visibility=reads)
    names = ["alice", "bruno", "cleo"]
    graph.add_node(Synthesizer("merger", merges=names, strategy="parallel", sampling=SHORT))
    graph.set_visibility(START, "merger", "reencoded").add_edge(names, "merger")
    state = graph.compile(engine=engine).invoke(QUESTION)
    [merged], *branches = (handles(state, name) for name in ("merger", *names))
    placed = dict(zip(parents(engine, merged), offsets(engine, merged), strict=False))
    root, question = parents(engine, merged)[:2]
    assert [placed[said] for [said] in branches] == [root.length, *[root.length + question.length] * 2]


@pytest.mark.parametrize("sees_plan", [True, False])
def test_parallel_branches_stand_where_they_left_what_is_in_view(engine: Engine, sees_plan: bool) -> None:
    """One branch comes from the question, the other, a superstep later, from a plan."""
    graph = ChoreoGraph(system="Root.")
    for name in ("alice", "planner", "bruno"):
        graph.add_node(agent(name, sampling=SHORT))
    graph.add_node(Synthesizer("merger", merges=["alice", "bruno"], strategy="parallel", sampling=SHORT))
    graph.add_edge(START, "alice").add_edge(START, "planner").add_edge("planner", "bruno")
    graph.add_edge(["alice", "bruno"], "merger", visibility={"planner": "shared"} if sees_plan else {})
    state = graph.compile(engine=engine).invoke(QUESTION)
    [merged], [alice], [plan], [bruno] = (handles(state, name) for name in ("merger", "alice", "planner", "bruno"))
    trunk = trunk_of(engine)
    start = sum(handle.length for handle in trunk)
    placed = dict(zip(parents(engine, merged), offsets(engine, merged), strict=False))
    assert placed[alice] == start, "it has not seen the plan"
    assert placed[bruno] == start + (plan.length if sees_plan else 0)
    assert (plan in placed) == sees_plan
    end = max(placed[each] + each.length for each in (alice, bruno))
    assert offsets(engine, merged)[-1] == end


def test_merged_text_is_encoded_again_after_what_stands_before_it(engine: Engine) -> None:
    state = merged_by(engine, ["zoe", "alice", "bruno"], strategy="text")
    [merged] = handles(state, "merger")
    view = trunk_of(engine)
    for name in ("zoe", "alice", "bruno"):
        [said] = handles(state, name)
        assert said not in engine.inspect.ancestors(merged)
        view.append(engine.prefill(engine.tokens(said), view))
    assert parents(engine, merged)[:-1] == view
    assert not {f"{name}.system" for name in ("alice", "bruno", "zoe")} & {*engine.inspect.ancestors(merged).values()}
    places = after_each_other(view)
    assert engine.tokens(merged) == by_hand(engine, view, places[:-1], places[-1])


def test_a_cache_merge_encodes_fewer_tokens_than_a_text_merge(make_engine: MakeEngine) -> None:
    encoded = {}
    for strategy in ("sequential", "parallel", "text"):
        engine = make_engine()
        state = merged_by(engine, ["alice", "bruno", "zoe"], strategy=strategy)
        encoded[strategy] = engine.stats().tokens_encoded
        branches = sum(handles(state, name)[0].length for name in ("alice", "bruno", "zoe"))
    assert encoded["sequential"] == encoded["parallel"] == encoded["text"] - branches


def test_a_merge_can_have_rules_and_sources_besides(engine: Engine) -> None:
    options = {"reads": {"bruno": "reencoded"}, "positions": "sequential"}
    state = merged_by(engine, {"zoe": "shared", "alice": "private"}, strategy="sequential", **options)
    [merged] = handles(state, "merger")
    seen = parents(engine, merged)
    assert handles(state, "zoe")[0] in seen and handles(state, "bruno")[0] not in seen
    assert [parent.author for parent in parents_of(engine, merged)[2:-1]] == ["zoe", "bruno"]
    assert offsets(engine, merged) == after_each_other(seen)


def test_summaries_that_cannot_be_mapped_are_given_back(make_engine: MakeEngine) -> None:
    left = []
    for strategy in ("sequential", "summary"):
        engine = make_engine()
        with pytest.raises(AdapterError, match="adapter 'nobody' is not loaded"):
            merged_by(engine, ["alice", "bruno", "zoe"], strategy=strategy, adapter="nobody")
        stats = engine.stats()
        left.append((stats.messages, stats.leases))
    assert left[0] == left[1]


@pytest.mark.parametrize("merges", [[], {}, "pro", ()], ids=repr)
def test_a_merge_of_nothing_is_refused(merges: Any) -> None:
    with pytest.raises(InvalidRequestError, match="merges must be the names of nodes"):
        Synthesizer("judge", merges=merges)


@pytest.mark.parametrize(
    ("strategy", "positions"), [("parallel", "sequential"), ("sequential", "parallel"), ("text", "parallel")]
)
def test_positions_that_contradict_a_strategy_are_refused(strategy: Any, positions: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"leave positions='{positions}' out"):
        Synthesizer("two", merges=["one"], strategy=strategy, positions=positions)
    same = "parallel" if strategy == "parallel" else "sequential"
    assert Synthesizer("two", merges=["one"], strategy=strategy, positions=same).positions == same


def test_a_strategy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match="strategy must be one of parallel, sequential, text, summary, not 'serial'"
    ):
        Synthesizer("judge", merges=["pro"], strategy="serial")  # type: ignore[arg-type]


def test_a_merge_of_what_is_no_node_is_refused(engine: Engine) -> None:
    graph = ChoreoGraph().add_node(Synthesizer("judge", merges=["nobody"])).add_edge(START, "judge")
    with pytest.raises(ValueError, match="names 'nobody', which is not a node"):
        graph.compile(engine=engine)


@pytest.mark.parametrize("strategy", ["sequential", "parallel", "text"])
@pytest.mark.parametrize("method", ["baseline", "naive"])
def test_engines_of_text_merge_text_whatever_the_strategy(make_engine: MakeEngine, method: str, strategy: str) -> None:
    engine = make_engine(method=method)
    state = merged_by(engine, ["zoe", "alice", "bruno"], strategy=strategy)
    [merged] = handles(state, "merger")
    plain = handles(merged_by(make_engine(method="naive"), ["zoe", "alice", "bruno"]), "merger")[0]
    assert offsets(engine, merged) == after_each_other(parents(engine, merged))
    assert merged.length == plain.length


# Input


def test_siblings_among_plain_nodes_stand_in_one_superstep(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    for name, words in (("one", "Who is it?"), ("two", "What does the friend of Ann have?"), ("later", "Why?")):
        graph.add_node(name, lambda _, name=name, words=words: {"messages": [AIMessage(words, name=name)]})
    reader = agent("reader", reads={"two": "shared", "one": "shared", "later": "shared"}, positions="parallel")
    graph.add_node(reader)
    graph.add_edge(START, "one").add_edge(START, "two").add_edge(["one", "two"], "later").add_edge("later", "reader")
    state = graph.compile(engine=engine).invoke(QUESTION)
    supersteps = {entry["author"]: entry["superstep"] for entry in state["handles"]}
    assert supersteps["one"] == supersteps["two"] > supersteps[START]
    assert supersteps["later"] > supersteps["one"] and supersteps["reader"] > supersteps["later"]
    [read] = handles(state, "reader")
    assert [parent.author for parent in parents_of(engine, read)] == [
        "public root",
        START,
        "two",
        "one",
        "later",
    ]
    *_, two, one, later, end = offsets(engine, read)
    longest = max(handles(state, name)[0].length for name in ("one", "two"))
    assert two == one and later == one + longest and end == later + handles(state, "later")[0].length


@pytest.mark.parametrize("given", [("user", "What does Ann have?"), {"role": "user", "content": "What does Ann have?"}])
@pytest.mark.parametrize("sync", [True, False])
def test_input_has_ids_before_a_route_at_the_start_sees_it(engine: Engine, given: Any, sync: bool) -> None:
    """Otherwise each branch would hand its own name for it back, and later routes would find none of them."""
    worker = Worker("worker", sampling=SHORT)
    graph = ChoreoGraph(system="Root.")
    graph.add_node(worker).add_node("join", lambda state: {}).add_node(agent("judge", reads={"worker": "shared"}))

    def start(state: Any) -> list[Send]:
        return [worker.send(state, text, speaker=name) for name, text in TOLD.items()]

    def choose(state: Any) -> Send:
        question, second = state["messages"][0].id, state["messages"][2].id
        return send("judge", state, shared=[question, second])

    graph.add_conditional_edges(START, start, ["worker"]).add_edge("worker", "join")
    graph.add_conditional_edges("join", choose, ["judge"], visibility={}).add_edge("judge", END)
    app = graph.compile(engine=engine)
    state = app.invoke({"messages": [given]}) if sync else asyncio.run(app.ainvoke({"messages": given}))
    assert len(entries(state, START)) == 1
    [judge] = handles(state, "judge")
    assert parents(engine, judge)[1:] == [*handles(state, START), handles(state)[1]]
