"""Merges of one's own become traces as an engine would place them; what is wrong is named by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from choreo_bench.synthesizers.own_merges import Merge, OwnCurriculum, OwnExamples, OwnMerges, fan_of_merge, read_merges
from support.chatty import save_chatty

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError, TrainingError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.sampling import Sampling
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.synthesis_traces import cache_trace, text_trace
from choreo_agents.training.synthesizer import train_synthesizer
from choreo_agents.training.trace import record
from choreo_agents.training.tuned import Tuned
from choreo_agents.training.tuning import CARD_FILE

MERGE: dict[str, Any] = {
    "system": "Say what you see.",
    "trunk": [{"role": "user", "content": "What do you see?"}],
    "branches": [
        {
            "name": "Alice",
            "content": "I see kites.",
            "context": [{"role": "system", "content": "Notes: Ann has 3 red kites."}],
        },
        {"name": "Bruno", "content": "I see drums and cups."},
    ],
    "ask": "What do we all see, in order?",
    "answer": "We see cups, drums, kites.",
    "name": "Clara",
}


def write(path: Path, *merges: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(merge) for merge in merges))
    return path


@pytest.mark.parametrize("layout", ["parallel", "sequential"])
def test_a_merge_is_placed_as_the_engine_merges_it(embedded: LoadedModel, layout: Any) -> None:
    merge = Merge.model_validate(MERGE)
    trace = cache_trace(fan_of_merge(embedded, merge, id="one"), layout)
    chat = embedded.chat
    with Engine.load(embedded) as engine, engine.scope():
        root = engine.prefill(chat.root(merge.system))
        trunk = [root, engine.prefill(chat.turn("user", "What do you see?"), [root])]
        notes = engine.prefill(chat.turn("system", "Notes: Ann has 3 red kites."), trunk)
        branches = [
            engine.prefill(chat.turn("assistant", "I see kites.", "Alice"), [*trunk, notes]),
            engine.prefill(chat.turn("assistant", "I see drums and cups.", "Bruno"), trunk),
        ]
        merged = engine.branches.merge(branches, merge.ask, strategy=layout, trunk=trunk, author="Clara")
        *_, asked, said = engine.inspect.records([merged])
    first, second = (trace.by_name[f"branch {number}"] for number in (1, 2))
    assert first.position == second.position + notes.length, "after what it alone was told"
    assert "context 1.1" in first.parents and len(first.parents) == len(second.parents) + 1
    ask, answer = trace.messages[-2:]
    assert (ask.tokens, ask.offsets, ask.position) == (asked.tokens, asked.offsets, asked.position)
    assert (answer.offsets, answer.position) == (said.offsets, said.position)
    assert answer.learn is not None
    words = embedded.decode(list(answer.tokens[answer.learn[0] :]), special=False)
    assert words.strip() == merge.answer


def test_lines_that_are_no_merges_are_named(embedded: LoadedModel, tmp_path: Path) -> None:
    def read(*merges: dict[str, Any]) -> Any:
        return read_merges(write(tmp_path / "own.jsonl", *merges), embedded, ["parallel"], 1)

    with pytest.raises(InvalidRequestError, match=r"line 2 of .* is not a valid merge: branches: Field required"):
        read(MERGE, {"answer": "Yes."})
    with pytest.raises(InvalidRequestError, match=r"line 1 of .* answer: String should have at least 1 character"):
        read(MERGE | {"answer": ""}, MERGE)
    with pytest.raises(TrainingError, match=r"line 2 of .* reaches position"):
        read(MERGE, MERGE | {"system": "word " * 3000})
    with pytest.raises(InvalidRequestError, match="has 1 merges: training and evaluation need"):
        read(MERGE)
    own = read(MERGE, MERGE, MERGE, MERGE)
    assert [(fan.id, len(fan.others)) for fan in own.train] == [("line 1", 2)]
    assert [fan.id for fan in own.held_out] == ["line 4"]


def test_a_merge_that_is_too_long_as_one_prompt_has_no_teacher(embedded: LoadedModel, tmp_path: Path) -> None:
    branches = [{"name": "Alice", "content": "I see kites. " * 150} for _ in range(6)]
    path = write(tmp_path / "own.jsonl", MERGE, MERGE | {"branches": branches}, MERGE | {"branches": branches[:2]})
    fan = read_merges(path, embedded, ["parallel"], 1).train[1]
    assert cache_trace(fan, "parallel").reach <= embedded.adapter.max_positions < text_trace(fan).reach
    with pytest.raises(TrainingError, match=r"line 2 of .* as one ordinary prompt, .* \(--imitation 0\)"):
        read_merges(path, embedded, ["parallel"], 1, taught=True)


def test_what_is_learnt_ends_where_a_decode_does(tmp_path: Path) -> None:
    """A ChatML turn goes on with a line's end, which nobody samples."""
    model = load_model(save_chatty(tmp_path / "chatty"))
    answer = cache_trace(fan_of_merge(model, Merge.model_validate(MERGE), id="one"), "parallel").messages[-1]
    with Engine.load(model) as engine:
        turn = model.encode(model.chat.turn("assistant", MERGE["answer"], "Clara"))
        assert answer.tokens == tuple(turn)
        words = turn[len(model.encode(model.chat.header("Clara"))) :]
        forced = tuple(words[: words.index(model.tokenizer.eos_token_id) + 1])
        said = engine.decode(
            model.chat.header("Clara"),
            sampling=Sampling(forced_token_ids=forced, max_tokens=len(forced)),
            turn_suffix=model.chat.turn_end,
        )
        recorded = record(engine, "one", [said]).messages[-1]
    assert recorded.tokens == answer.tokens and recorded.learn == answer.learn
    assert answer.learn is not None and answer.learn[1] == len(answer.tokens) - 1


def test_epochs_are_the_same_each_time_and_mix_layouts(embedded: LoadedModel, tmp_path: Path) -> None:
    others = [MERGE | {"branches": [{"content": f"I see {what}."}] * 2} for what in ("cups", "hats", "keys")]
    path = write(tmp_path / "own.jsonl", *others * 4)
    own = read_merges(path, embedded, ["parallel", "sequential"], 2)
    tuned = Tuned(embedded, TuneSettings(rank=2, mapper_rank=2, imitation=0.5))
    examples = OwnExamples(OwnCurriculum(own, ("parallel", "sequential")), tuned)
    first = examples.epoch(0)
    assert [each.trace for each in first] == [each.trace for each in examples.epoch(0)]
    starts = {each.trace.messages[-1].position for each in first}
    assert len(starts) > 1, "some side by side, some in sequence"
    assert all(each.teacher is not None and each.teacher.learnt_tokens == each.trace.learnt_tokens for each in first)
    other = OwnExamples(OwnCurriculum(own, ("parallel",)), tuned)
    assert other.digest != examples.digest


def test_lines_with_the_same_branches_are_encoded_together(embedded: LoadedModel, tmp_path: Path) -> None:
    asked = [MERGE | {"ask": f"What does {who} see?"} for who in ("Ann", "Bob", "Dan", "Eve", "Kim", "Leo", "Pam")]
    other = MERGE | {"branches": [{"content": "I see hats."}]}
    own = read_merges(write(tmp_path / "own.jsonl", *asked, other, asked[0], other), embedded, ["parallel"], 1)
    assert [(fan.id, len(fan.others)) for fan in own.train] == [
        ("line 1", 5),
        ("line 7", 1),
    ]
    assert own.as_object(["parallel"])["own merges"] == 8
    trace = cache_trace(own.train[0], "parallel")
    alone = cache_trace(fan_of_merge(embedded, Merge.model_validate(asked[5]), id="alone"), "parallel")
    assert trace.by_name["ask 6"].tokens == alone.by_name["ask"].tokens
    assert trace.by_name["answer 6"].offsets == alone.by_name["answer"].offsets


@pytest.mark.parametrize(
    ("groups", "held_out", "judging"),
    [
        ([3, 3, 3], 3, 3),
        ([3, 3, 3], 2, 3),
        ([3, 3, 3], 1, 3),
        ([4, 4, 1], 3, 1),
        ([5, 1, 1, 1, 1], 3, 3),
        ([6], 2, 2),
        ([1, 8], 2, 1),
        ([1, 1, 1, 1, 5], 3, 3),
        ([9, 9], 2, 9),
        ([1] * 9, 2, 2),
    ],
)
def test_what_judges_has_branches_that_nothing_learnt_has(
    embedded: LoadedModel, tmp_path: Path, groups: list[int], held_out: int, judging: int
) -> None:
    """Unless all lines have the same. Wherever they stand in the file, and whatever was said before them."""
    lines = [
        MERGE | {"branches": [{"content": f"I see {number} hats."}], "ask": f"Which, {line}?"}
        for number, count in enumerate(groups, start=2)
        for line in range(count)
    ]
    lines = [line | {"trunk": [{"role": "user", "content": f"Hear, {at}."}]} for at, line in enumerate(lines)]
    lines = [lines[at] for at in sorted(range(len(lines)), key=lambda at: (at % 3, at))]
    own = read_merges(write(tmp_path / "own.jsonl", *lines), embedded, ["parallel"], held_out)
    assert len(own.held_out) == judging and own.as_object([])["own merges"] == len(lines) - judging
    learnt = {fan.branches for fan in own.train}
    assert {fan.branches in learnt for fan in own.held_out} == {len(groups) == 1}


def test_a_synthesizer_learns_ones_own_answers(embedded: LoadedModel, tmp_path: Path) -> None:
    odd = [MERGE | {"answer": "We see no kites."} for _ in range(6)]
    own = read_merges(write(tmp_path / "own.jsonl", *odd), embedded, ["parallel"], 2)
    settings = TuneSettings(rank=4, mapper_rank=2, epochs=6, learning_rate=1e-2, batch_tokens=256)
    where = {"run": tmp_path / "run", "out": tmp_path / "out"}
    trained = train_synthesizer(embedded, settings, OwnCurriculum(own, ("parallel",)), **where)
    assert trained.untrained.score < trained.untrained.score / 2 < trained.best.score < 0, "losses with a minus"
    card = json.loads((tmp_path / "out" / CARD_FILE).read_text())
    assert card["curriculum"] == {"own merges": 4, "held_out": 2, "layouts": ["parallel"]}
    shorter = read_merges(tmp_path / "own.jsonl", embedded, ["parallel"], 1)
    assert len(shorter.held_out) == 1 and shorter.held_out_digest != own.held_out_digest
    other = OwnMerges(own.train, own.held_out[::-1])
    with pytest.raises(TrainingError, match="a run with other held-out data"):
        train_synthesizer(embedded, settings, OwnCurriculum(other, ("parallel",)), **where)
