"""What a synthesizer reads behind each branch: where it stands, what it costs, and that nothing of it is left."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from langgraph.checkpoint.memory import InMemorySaver
from support.adapters import save_adapter, save_mapper
from support.graphs import QUESTION
from support.merges import give_back, heard, require_nothing_left, team, view_of

from choreo_agents import START, Agent, ChoreoGraph, Engine, MessageHandle, Sampling, Synthesizer
from choreo_agents.errors import AdapterError
from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.mapper import MERGING_FILE, reads_boundaries, write_boundaries
from choreo_agents.training.synthesis_traces import boundaries_of
from choreo_agents.training.trace import TraceMessage

SHORT = Sampling(max_tokens=5, stop_tokens=())


@pytest.fixture(scope="module")
def merger(tiny: LoadedModel, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter and a mapper, neither of which does nothing, that read boundaries."""
    folder = tmp_path_factory.mktemp("merger") / "merger"
    save_adapter(folder, tiny_path)
    save_mapper(folder, tiny)
    write_boundaries(folder)
    return folder


def behind(engine: Engine, branches: list[MessageHandle]) -> list[list[int]]:
    return [engine.model.encode(engine.chat.start("assistant")) for _ in branches]


@pytest.mark.parametrize("strategy", ["parallel", "sequential"])
def test_each_branch_is_followed_by_the_opening_of_a_turn(make_engine: MakeEngine, merger: Path, strategy: Any) -> None:
    engine = make_engine()
    engine.load_adapter(merger)
    trunk, branches = team(engine)
    before = engine.stats()
    view = view_of(engine, branches, [9, 9, 9], strategy=strategy, adapter="merger")
    copies = engine.branches.map(branches, "merger")
    starts = view.handles[5:8]
    assert view.handles[:5] == [*trunk, *copies] and len(view.handles) == 9
    assert [engine.tokens(each) for each in starts] == behind(engine, branches)
    end = sum(handle.length for handle in trunk)
    assert view.offsets[5:8] == [at + each.length for at, each in zip(view.offsets[2:5], copies, strict=True)]
    for start, copy in zip(starts, copies, strict=True):
        [record] = [each for each in engine.inspect.records([start]) if each.handle == start]
        assert list(record.parents) == [*trunk, copy], "no branch's boundary sees another branch"
        assert [*record.offsets, record.position] == [0, trunk[0].length, end, end + copy.length]
    asked = end + (sum if strategy == "sequential" else max)(each.length for each in branches)
    assert view.offsets[8] == asked and view.end == asked + 3, "nothing moves for it"
    encoded = engine.stats().tokens_encoded - before.tokens_encoded
    assert encoded == 3 + sum(map(len, behind(engine, branches)))
    assert engine.stats().steps - before.steps <= 3, "all boundaries in one"
    give_back(engine, view)
    for handle in [*trunk, *branches]:
        engine.release(handle)
    require_nothing_left(engine)


def test_they_change_what_is_heard_and_side_by_side_their_order_does_not(make_engine: MakeEngine, merger: Path) -> None:
    engine = make_engine(adapter=merger)
    _, branches = team(engine)
    logits = []
    for order in permutations(branches):
        view = view_of(engine, list(order), [9, 9, 9], strategy="parallel")
        assert len(view.handles) == 9
        logits.append(heard(engine, view))
        give_back(engine, view)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=0, atol=1e-4)
    whole = view_of(engine, branches, [9, 9, 9], strategy="parallel")
    without = [place for place in range(9) if place not in (5, 6, 7)]
    whole.handles[:], whole.offsets[:] = ([each[place] for place in without] for each in (whole.handles, whole.offsets))
    assert (heard(engine, whole) - logits[0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("method", "strategy"), [("choreo", "text"), ("baseline", "parallel"), ("naive", "sequential")]
)
def test_words_need_none(make_engine: MakeEngine, merger: Path, method: Any, strategy: Any) -> None:
    engine = make_engine(method=method, adapter=merger)
    _, branches = team(engine)
    view = view_of(engine, branches, [9], strategy=strategy)
    assert len(view.handles) == 6
    if method != "choreo":
        assert engine.branches.boundaries(branches, [], [], [0] * 3) == []


def test_summaries_have_them_too(make_engine: MakeEngine, merger: Path) -> None:
    engine = make_engine(adapter=merger)
    _, branches = team(engine)
    view = view_of(engine, branches, strategy="summary")
    assert [engine.tokens(each) for each in view.handles[5:]] == behind(engine, branches)


def test_who_reads_none_encodes_none(make_engine: MakeEngine, tiny: LoadedModel, tmp_path: Path) -> None:
    engine = make_engine(adapter=save_mapper(tmp_path / "mapper", tiny))
    _, branches = team(engine)
    assert (
        engine.branches.boundaries(branches, [], [], [0] * 3)
        == []
        == engine.branches.boundaries(branches, [], [], [0] * 3, "base")
    )
    with pytest.raises(AdapterError, match="adapter 'other' is not loaded"):
        engine.branches.boundaries(branches, [], [], [0] * 3, "other")


def test_a_tenants_own_adapter_has_its_own_boundaries(make_engine: MakeEngine, tiny: LoadedModel, merger: Path) -> None:
    """Another tenant's of the same name reads none."""
    engine = make_engine()
    mine, other = engine.tenant("mine"), engine.tenant("other")
    mine.load_adapter(merger, "editor")
    other.load_adapter(save_mapper(merger.parent / "plain", tiny), "editor")
    lengths = []
    for each in (mine, other):
        trunk, branches = team(each)
        view = view_of(each, branches, [9], adapter="editor")
        lengths.append(len(view.handles))
        give_back(each, view)
        for handle in [*trunk, *branches]:
            each.release(handle)
        require_nothing_left(each)
    assert lengths == [9, 6]


def test_copies_that_were_put_away_are_read_behind_too(make_engine: MakeEngine, merger: Path) -> None:
    engine = make_engine(adapter=merger, kv_budget_bytes=1 << 20)
    _, branches = team(engine)
    heards = []
    for _ in range(2):
        view = view_of(engine, branches, [9, 9, 9], strategy="parallel")
        assert len(view.handles) == 9
        heards.append(heard(engine, view))
        give_back(engine, view)
        copies = engine.branches.map(branches)
        engine.kv.offload(copies)
        assert set(engine.kv.tiers(copies)) == {"lineage"}
    assert torch.equal(*heards)


def test_the_turn_that_a_branch_is_decides_what_follows_it(make_engine: MakeEngine, merger: Path) -> None:
    """Whatever role somebody else has encoded the same tokens under."""
    engine = make_engine(adapter=merger)
    roles: tuple[Any, ...] = ("user", "system", "assistant")
    said = [engine.prefill(engine.chat.turn(role, "Ann has 3 red kites."), role="user") for role in roles]
    said.append(engine.prefill([5, 6, 7], role="user"))
    calls = engine.branches.boundaries(said, [], [], [0] * 4)
    assert [call.content for call in calls] == [engine.chat.start(role) for role in (*roles, "assistant")]
    assert len({call.content for call in calls}) == 3
    assert [(call.offsets, call.position) for call in calls] == [([0], handle.length) for handle in said]


def test_a_branch_that_left_the_trunk_early_has_its_boundary_there(make_engine: MakeEngine, merger: Path) -> None:
    """Trunk and branch would not fit into the context one behind the other."""
    engine = make_engine(adapter=merger)
    root = engine.prefill([5 + number % 200 for number in range(24)])
    most = engine.model.adapter.max_positions
    long = engine.prefill([7 + number % 200 for number in range(most // 2)], [root])
    branches = [engine.prefill([9 + (i + n) % 200 for n in range(most // 2 - 10)], [root]) for i in range(2)]
    view = view_of(engine, branches, strategy="parallel", trunk=[root, long])
    assert view.end == 24 + most // 2 and view.offsets[2:4] == [24, 24]
    for start, branch in zip(view.handles[4:], engine.branches.map(branches), strict=True):
        [record] = [each for each in engine.inspect.records([start]) if each.handle == start]
        assert record.parents == (root, branch), "not what came after it had left"


@pytest.mark.parametrize("starts", [("", "", ""), ("", "<|user|>", "")])
def test_templates_that_open_turns_with_nothing(
    make_engine: MakeEngine, tiny: LoadedModel, merger: Path, starts: tuple[str, ...]
) -> None:
    chat = tiny.chat
    turns = [
        replace(turn, plain=start) for turn, start in zip((chat.system, chat.user, chat.assistant), starts, strict=True)
    ]
    model = replace(tiny, chat=replace(chat, system=turns[0], user=turns[1], assistant=turns[2]))
    engine = make_engine(model, adapter=merger)
    _, branches = team(engine)
    view = view_of(engine, branches, [9])
    assert [engine.text(each) for each in view.handles[5:-1]] == [start for start in starts if start] * 3
    spans = [TraceMessage("b", tuple(engine.tokens(branch))) for branch in branches]
    assert len(boundaries_of(model, spans)) == len(view.handles[5:-1])


def test_a_name_is_not_given_to_one_that_reads_otherwise(
    make_engine: MakeEngine, merger: Path, tiny: LoadedModel, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.load_adapter(merger, "one")
    other = tmp_path / "other"
    other.mkdir()
    for file in merger.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert engine.load_adapter(other, "one") == "one"
    (other / MERGING_FILE).unlink()
    with pytest.raises(AdapterError, match="the adapter name 'one' is taken"):
        engine.load_adapter(other, "one")


@pytest.mark.parametrize("text", ["", "[]", '{"boundaries": "perhaps"}', '{"boundaries": true, "more": 1}', "\xff"])
def test_a_damaged_file_is_refused(make_engine: MakeEngine, merger: Path, tmp_path: Path, text: str) -> None:
    for file in merger.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert reads_boundaries(tmp_path) and not reads_boundaries(tmp_path / "none")
    (tmp_path / MERGING_FILE).write_text(text, "latin-1")
    with pytest.raises(AdapterError, match=r"merging.json' cannot be read: train again"):
        make_engine(adapter=tmp_path)


def speaker(name: str, length: int) -> Agent:
    return Agent(name, sampling=Sampling(max_tokens=length, stop_tokens=(), temperature=1.0, seed=length))


def editing(length: int, **options: Any) -> ChoreoGraph:
    """Alice and bruno, who say a different number of tokens, and the editor of both."""
    graph = ChoreoGraph(system="Root.")
    for more, name in enumerate(("alice", "bruno")):
        graph.add_node(speaker(name, 2 * (length + more))).add_edge(START, name)
    given: dict[str, Any] = {"merges": ["alice", "bruno"], "sampling": SHORT, "adapter": "merger"} | options
    graph.add_node(Synthesizer("editor", **given))
    return graph.add_edge(["alice", "bruno"], "editor", visibility={})


@pytest.mark.parametrize("strategy", ["parallel", "sequential"])
def test_a_node_reads_what_the_engine_would(make_engine: MakeEngine, merger: Path, strategy: Any) -> None:
    engine = make_engine(kv_budget_bytes=1 << 24)
    engine.load_adapter(merger)
    graph = editing(4, merges=["bruno", "alice"], prompt="Say it all.", strategy=strategy)
    before = engine.stats().leases
    with engine.scope():
        state = graph.compile(engine=engine).invoke(QUESTION)
        said = {e["author"]: MessageHandle.model_validate(e["handle"]) for e in state["handles"]}
        root = engine.prefill(engine.chat.root("Root."))
        trunk = [root, engine.prefill(engine.chat.turn("user", "What does Ann have?"), [root])]
        view = view_of(
            engine, [said["bruno"], said["alice"]], "Say it all.", strategy=strategy, trunk=trunk, adapter="merger"
        )
        [record] = [each for each in engine.inspect.records([said["editor"]]) if each.handle == said["editor"]]
        assert list(record.parents) == view.handles and list(record.offsets) == view.offsets
        assert record.position == view.end and len(view.handles) == 7
    assert engine.stats().leases == before
    engine.check()


def test_a_node_keeps_no_lease_of_them(
    make_engine: MakeEngine, merger: Path, tiny: LoadedModel, tmp_path: Path
) -> None:
    leases = []
    for adapter in (merger, save_mapper(tmp_path / "merger", tiny)):
        engine = make_engine(kv_budget_bytes=1 << 24)
        engine.load_adapter(adapter, "merger")
        editing(2).compile(engine=engine).invoke(QUESTION)
        leases.append(engine.stats().leases)
    assert leases[0] == leases[1] > 0


@pytest.mark.parametrize("strategy", ["parallel", "sequential"])
def test_in_a_second_round_a_boundary_sees_the_first(make_engine: MakeEngine, merger: Path, strategy: Any) -> None:
    """What was said and asked since the first branches stands before the next."""
    engine = make_engine(kv_budget_bytes=1 << 24)
    engine.load_adapter(merger)
    app = editing(2, strategy=strategy).compile(engine=engine, checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "one"}}
    with engine.scope():
        app.invoke(QUESTION, config)
        state = app.invoke({"messages": [("user", "And Bob?")]}, config)
        said = [MessageHandle.model_validate(entry["handle"]) for entry in state["handles"]]
        authors = [entry["author"] for entry in state["handles"]]
        assert [*map(authors.index, ("alice", "bruno", "editor"))] == [1, 2, 3] and len(said) == 8
        known = {each.handle: each for each in engine.inspect.records(said)}
        last = known[said[authors.index("editor", 4)]]
        copies = engine.branches.map(
            [said[place] for place, author in enumerate(authors) if author in ("alice", "bruno")], "merger"
        )
        opening = engine.model.encode(engine.chat.start("assistant"))
        starts = [each for each in last.parents if list(known[each].tokens) == opening]
        root = engine.prefill(engine.chat.root("Root."))
        first, since = [root, said[0]], [root, said[0], *copies[:2], said[3], said[4]]
        assert [list(known[each].parents) for each in starts] == [
            [*first, copies[0]], [*first, copies[1]], [*since, copies[2]], [*since, copies[3]]
        ]  # fmt: skip
        placed = dict(zip(last.parents, last.offsets, strict=True))
        assert [placed[each] for each in starts] == [placed[each] + each.length for each in copies]


@pytest.mark.parametrize("strategy", ["parallel", "sequential"])
@pytest.mark.parametrize("beside", [False, True])
def test_what_is_only_read_stands_between_branches_without_parting_them(
    make_engine: MakeEngine, merger: Path, strategy: Any, beside: bool
) -> None:
    """Carl speaks beside both, or before bruno."""
    engine = make_engine(kv_budget_bytes=1 << 24)
    engine.load_adapter(merger)
    graph = ChoreoGraph(system="Root.")
    for length, name in enumerate(("alice", "carl", "bruno"), start=2):
        graph.add_node(speaker(name, 2 * length))
    for source, target in (("START", "alice"), ("START", "carl"), ("START" if beside else "carl", "bruno")):
        graph.add_edge(START if source == "START" else source, target)
    options: dict[str, Any] = {"reads": {"carl": "shared"}, "sampling": SHORT, "adapter": "merger"}
    graph.add_node(Synthesizer("editor", merges=["alice", "bruno"], strategy=strategy, **options))
    graph.add_edge(["alice", "carl", "bruno"], "editor")
    with engine.scope():
        state = graph.compile(engine=engine).invoke(QUESTION)
        said = {e["author"]: MessageHandle.model_validate(e["handle"]) for e in state["handles"]}
        last, known = said["editor"], {each.handle: each for each in engine.inspect.records([said["editor"]])}
        alice, bruno = engine.branches.map([said["alice"], said["bruno"]], "merger")
        opening = engine.model.encode(engine.chat.start("assistant"))
        seen = [set(known[each].parents) for each in known[last].parents if list(known[each].tokens) == opening]
        assert len(seen) == 2 and alice in seen[0] and bruno in seen[1]
        assert bruno not in seen[0] and alice not in seen[1], "no branch beside its own"
        if not beside:
            assert said["carl"] not in seen[0] and said["carl"] in seen[1], "who spoke before bruno, not before alice"
