"""Synthesis problems played: from words and from caches, with workers given or said, and scored in pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from choreo_bench.evaluation.merging import play_synthesis
from choreo_bench.evaluation.synthesis import (
    SynthesisRecord,
    evaluate_synthesis,
    solved_by_task,
)
from choreo_bench.language import TASKS, Problem, draw_problem
from choreo_bench.language.synthesis import SYNTHESIS_TASKS, Parts
from conftest import MakeEngine

from choreo_agents.engine import Engine
from choreo_agents.engine.calls import Decode
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.synthesis.placing import SYNTHESIS_LAYOUTS, place_branches

SHORT, GREEDY = Sampling(max_tokens=4), Sampling(max_tokens=96)
VOTE = replace(SYNTHESIS_TASKS["vote"], branches=4)  # type: ignore[type-var]


@pytest.fixture
def vote() -> Problem:
    """Some of its workers have notes, some none."""
    return next(
        problem
        for problem in (draw_problem(VOTE, "test", seed) for seed in range(50))
        if {bool(branch.private) for branch in Parts.of(problem).branches} == {True, False}
    )


@pytest.mark.parametrize(
    ("layout", "anchors", "end"),
    [("sequential", [9, 13, 15], 20), ("parallel", [9, 9, 9], 14), ("native", [12, 9, 30], 35)],
)
def test_branches_stand_where_the_layout_says(layout: Any, anchors: list[int], end: int) -> None:
    assert place_branches(layout, [1, 8], [(12, 4), (9, 2), (30, 5)]) == ([0, 1], anchors, end)


async def test_text_and_caches_answer_a_question_that_the_model_knows(
    embedded: LoadedModel, make_engine: MakeEngine, vote: Problem
) -> None:
    for method, layout in [("baseline", "sequential"), ("choreo", "sequential"), ("choreo", "parallel")]:
        engine = make_engine(embedded, method=method)
        merged = await play_synthesis(engine, vote, sampling=GREEDY, layout=layout)  # type: ignore[arg-type]
        assert merged.ended and set(merged.texts) == {"answer"}
        assert engine.model.decode(list(merged.tokens), special=False).endswith(merged.texts["answer"])
        assert engine.stats().leases == 0
        assert vote.score(merged.texts) == 1.0 or method == "choreo"


async def test_private_notes_never_reach_the_synthesizers_own_view(
    embedded: LoadedModel, make_engine: MakeEngine, vote: Problem
) -> None:
    engine = make_engine(embedded, method="naive")
    before = engine.stats().tokens_encoded
    merged = await play_synthesis(engine, vote, sampling=GREEDY)
    told = [m.text for m in vote.messages if m.name in vote.by_name["answer"].parents]
    turns = [engine.chat.turn(m.role, m.text, m.author).text for m in vote.messages if m.text in told]
    seen = sum(len(engine.model.encode(turn)) for turn in turns) + 1 + len(merged.tokens)
    assert engine.stats().tokens_encoded - before <= seen


async def test_workers_with_notes_may_really_say_their_words_and_the_others_are_given_them(
    embedded: LoadedModel, make_engine: MakeEngine, vote: Problem
) -> None:
    engine = make_engine(embedded)
    merged = await play_synthesis(engine, vote, sampling=GREEDY, workers="say")
    branches = Parts.of(vote).branches
    assert set(merged.texts) == {"answer", *(b.words.name for b in branches if b.private)}
    right = [merged.texts[b.words.name] == b.words.text for b in branches if b.private]
    assert any(right), "notes tell a worker what to say"
    assert engine.stats().leases == 0


async def test_what_is_mapped_stands_in_the_place_of_its_branch(
    make_engine: MakeEngine, vote: Problem, tmp_path: Path
) -> None:
    engine = make_engine()
    model = engine.model.adapter
    CacheMapper(model.geometry, model.kinds).save(tmp_path / "mapper", model.weights)
    name = engine.load_adapter(tmp_path / "mapper")
    seen: list[tuple[list[MessageHandle], list[int | None]]] = []
    decode = engine.adecode

    async def watched(calls: Any) -> Any:
        seen.extend((list(call.parents), list(call.offsets)) for call in calls)
        return await decode(calls)

    engine.adecode = watched  # type: ignore[assignment, method-assign]
    await play_synthesis(engine, vote, sampling=SHORT, layout="native", adapter=name)
    await play_synthesis(engine, vote, sampling=SHORT, layout="native")
    (mapped, at), (plain, also_at) = seen
    copies = ["~" in handle.model for handle in mapped]
    assert copies.count(True) == 4 and not any("~" in handle.model for handle in plain)
    assert [handle for handle, copied in zip(mapped[:-1], copies, strict=False) if not copied] == [
        handle for handle, copied in zip(plain[:-1], copies, strict=False) if not copied
    ]
    assert [handle.length for handle in mapped] == [handle.length for handle in plain] and at == also_at
    assert engine.stats().leases == 0


class Adapters:
    """Stands before an engine that has no adapters, and remembers which were asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.branches = self
        self.named: list[tuple[str | None, str | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def maps(self, adapter: str | None = None) -> bool:
        return False

    def boundaries(self, *_: Any) -> list[Any]:
        return []

    async def aprefill(self, *args: Any, adapter: str | None = None, **options: Any) -> MessageHandle:
        self.named.append((options.get("author") or options["role"], adapter))
        return await self.engine.aprefill(*args, **options)

    async def adecode(self, calls: list[Decode]) -> list[MessageHandle]:
        self.named += [(call.author, call.adapter) for call in calls]
        return await self.engine.adecode([replace(call, adapter=None) for call in calls])


@pytest.mark.parametrize("workers", ["given", "say"])
async def test_the_adapter_is_the_synthesizers_alone(make_engine: MakeEngine, vote: Problem, workers: Any) -> None:
    recorder = Adapters(make_engine())
    await play_synthesis(recorder, vote, sampling=SHORT, workers=workers, adapter="merge")  # type: ignore[arg-type]
    answer = Parts.of(vote).answer
    assert recorder.named[-2:] == [("user", "merge"), (answer.author, "merge")]
    assert {adapter for _, adapter in recorder.named[:-2]} == {None}


async def test_what_cannot_be_played_is_refused_and_everything_given_back(
    make_engine: MakeEngine, vote: Problem
) -> None:
    text, cache = make_engine(method="baseline"), make_engine()

    with pytest.raises(ValueError, match="cannot place messages"):
        await play_synthesis(text, vote, sampling=SHORT, layout="parallel")
    with pytest.raises(ValueError, match="unknown layout 'spiral'"):
        await play_synthesis(cache, vote, sampling=SHORT, layout="spiral")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a synthesis"):
        await play_synthesis(cache, draw_problem(TASKS["recall"], "test", 0), sampling=SHORT)
    with pytest.raises(ValueError, match="adapter 'merger' is not loaded"):
        await play_synthesis(cache, vote, sampling=SHORT, adapter="merger")
    with pytest.raises(ValueError, match="must be at least 1"):
        evaluate_synthesis(cache, [VOTE], count=0)
    assert cache.stats().leases == text.stats().leases == 0


@pytest.mark.slow
def test_records_are_of_the_same_problems_however_they_are_played(
    embedded: LoadedModel, make_engine: MakeEngine
) -> None:
    own = [VOTE, replace(SYNTHESIS_TASKS["best"], branches=3)]  # type: ignore[type-var]
    text = evaluate_synthesis(make_engine(embedded, method="baseline"), own, count=6)
    assert [(record.task, record.number) for record in text] == [(t.name, n) for t in own for n in range(6)]
    assert text[2:6] == evaluate_synthesis(make_engine(embedded, method="baseline"), own[:1], count=4, seed=2)
    assert text == evaluate_synthesis(make_engine(embedded, method="baseline"), own, count=6)
    for layout in SYNTHESIS_LAYOUTS:
        caches = evaluate_synthesis(make_engine(embedded), own, count=6, layout=layout)
        assert [(record.task, record.number) for record in caches] == [(r.task, r.number) for r in text]
    solved = solved_by_task(text)
    assert solved["vote"].count == 6 and solved["vote"].right >= 5
    said = evaluate_synthesis(make_engine(embedded), own[:1], count=6, workers="say")
    assert any(record.workers for record in said) and all(len(record.workers) <= 4 for record in said)


def test_what_is_solved_is_counted_by_task() -> None:
    played = [("a", 1.0), ("a", 1.0), ("a", 0.5), ("b", 0.0), ("b", 0.0)]
    records = [SynthesisRecord(task, number, score, "") for number, (task, score) in enumerate(played)]
    assert {name: (score.right, score.count) for name, score in solved_by_task(records).items()} == {
        "a": (2, 3),
        "b": (0, 2),
    }
