"""Traces of synthesis: what the engine would have encoded, where, and what is learnt of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from choreo_bench.evaluation import play
from choreo_bench.evaluation.merging import _Play, play_synthesis
from choreo_bench.language import Problem, ProblemMessage, draw_problem, draw_problems
from choreo_bench.language.synthesis import SYNTHESIS_TASKS, Parts
from choreo_bench.synthesizers.examples import fan_of
from conftest import MakeEngine
from hypothesis import given
from hypothesis import strategies as st
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents.engine import Engine
from choreo_agents.errors import TrainingError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.placing import SYNTHESIS_LAYOUTS, SynthesisLayout
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.synthesis_traces import ROOT, Views, asked_together, cache_trace, text_trace, turn_message
from choreo_agents.training.trace import Trace
from choreo_agents.training.tuned import Tuned

NAMES = sorted(SYNTHESIS_TASKS)
SHORT = Sampling(max_tokens=3)


class Recorder:
    """Stands before an engine and remembers the id of what was prefilled, and where a decode saw what."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prefilled: list[str] = []
        self.decoded: list[tuple[list[str], list[int], int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def aprefill(self, *args: Any, **options: Any) -> Any:
        made = await self.engine.aprefill(*args, **options)
        self.prefilled += [handle.id for handle in (made if isinstance(made, list) else [made])]
        return made

    async def adecode(self, header: Any, *args: Any, **options: Any) -> Any:
        if isinstance(header, list):
            [call] = header
            parents, offsets, start = call.parents, call.offsets, call.position
        else:
            parents, offsets, start = args
        at = [sum(parent.length for parent in parents[:place]) for place in range(len(parents) + 1)]
        shown = at[:-1] if offsets is None else list(offsets)
        self.decoded.append(([parent.id for parent in parents], shown, at[-1] if start is None else start))
        return await self.engine.adecode(header, *args, **options)


async def replayed(engine: Engine, trace: Trace) -> dict[str, MessageHandle]:
    """Every message of a trace, prefilled as it says."""
    handles: dict[str, MessageHandle] = {}
    for message in trace.messages:
        parents = [handles[name] for name in message.parents]
        if message.mapped:
            [handles[message.name]] = await engine.branches.amap(parents, "merge")
            continue
        handles[message.name] = await engine.aprefill(
            message.tokens, parents, message.offsets, message.position, adapter=message.adapter
        )
    return handles


def uneven(name: str, seed: int = 0, **knobs: Any) -> Problem:
    """A problem some of whose workers have notes, of different lengths, and some none."""
    task = replace(SYNTHESIS_TASKS[name], **knobs)  # type: ignore[type-var]
    return next(
        problem
        for problem in (draw_problem(task, "test", number) for number in range(seed, seed + 100))
        if len({sum(len(m.text) for m in branch.private) for branch in Parts.of(problem).branches}) > 2
        or len(problem.branches) == 2
    )


@pytest.mark.parametrize("layout", SYNTHESIS_LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
async def test_a_trace_holds_what_the_engine_encodes_where_it_encodes_it(
    make_engine: MakeEngine, name: str, layout: SynthesisLayout
) -> None:
    engine, problem = make_engine(), uneven(name, branches=3)
    recorder = Recorder(engine)
    await play_synthesis(recorder, problem, sampling=SHORT, layout=layout)  # type: ignore[arg-type]
    trace = cache_trace(fan_of(engine.model, problem, id="t"), layout)
    handles = await replayed(engine, trace)
    *given_, answer = trace.messages
    assert sorted(handles[message.name].id for message in given_) == sorted(recorder.prefilled)
    parents = [handles[name].id for name in answer.parents]
    assert recorder.decoded == [(parents, list(answer.offsets), answer.position)]


@pytest.mark.parametrize("layout", SYNTHESIS_LAYOUTS)
@pytest.mark.parametrize("name", ["vote", "reports", "assembly"])
@pytest.mark.parametrize("ranks", [(2, 0), (2, 2), (0, 2)])
async def test_a_boundary_is_encoded_behind_each_branch(
    tiny: LoadedModel, make_engine: MakeEngine, tmp_path: Path, name: str, layout: SynthesisLayout, ranks: Any
) -> None:
    tuned = Tuned(tiny, TuneSettings(rank=ranks[0], mapper_rank=ranks[1], boundaries=True))
    tuned.save(tmp_path / "merge")
    engine, problem = make_engine(), uneven(name, branches=3)
    engine.load_adapter(tmp_path / "merge")
    recorder = Recorder(engine)
    await play_synthesis(recorder, problem, sampling=SHORT, layout=layout, adapter="merge")  # type: ignore[arg-type]
    mapped, adapter = tuned.mapper is not None, "merge" if tuned.lora else None
    trace = cache_trace(fan_of(tiny, problem, id="t"), layout, Views(mapped=mapped, adapter=adapter, boundaries=True))
    handles = await replayed(engine, trace)
    *given_, answer = trace.messages
    made = [message.name for message in given_ if not message.mapped]
    assert sorted(handles[name].id for name in made) == sorted(recorder.prefilled)
    parents = [handles[name].id for name in answer.parents]
    assert recorder.decoded == [(parents, list(answer.offsets), answer.position)]
    ends = [message for message in given_ if message.name.endswith(" end")]
    starts = {
        branch.words.name: tiny.encode(tiny.chat.start(branch.words.role)) for branch in Parts.of(problem).branches
    }
    assert [list(end.tokens) for end in ends] == [*starts.values()] and all(starts.values())
    offsets = dict(zip(answer.parents, answer.offsets, strict=True))
    for end in ends:
        shown = end.parents[-1]
        assert offsets[end.name] == offsets[shown] + len(trace.by_name[shown].tokens), "where the branch ends"
    assert not any(end.name in message.parents for end in ends for message in ends)


@pytest.mark.parametrize("layout", ["sequential", "parallel"])
async def test_the_layouts_are_those_of_ordinary_play(make_engine: MakeEngine, layout: Any) -> None:
    engine, problem = make_engine(), uneven("union", branches=4)
    recorder = Recorder(engine)
    await play(recorder, problem, sampling=SHORT, layout=layout)  # type: ignore[arg-type]
    trace = cache_trace(fan_of(engine.model, problem, id="t"), layout)
    handles = await replayed(engine, trace)
    answer = trace.messages[-1]
    assert sorted(handles[m.name].id for m in trace.messages[:-1]) == sorted(recorder.prefilled)
    parents = [handles[name].id for name in answer.parents]
    assert recorder.decoded == [(parents, list(answer.offsets), answer.position)]


async def test_a_text_trace_is_the_ordinary_prompt(make_engine: MakeEngine, tiny: LoadedModel) -> None:
    """Its tokens in order are what the baseline encodes."""
    engine, problem = make_engine(method="baseline"), uneven("vote", branches=4)
    parts = Parts.of(problem)
    turns = [*parts.trunk, *(branch.words for branch in parts.branches), *parts.asks, parts.answer]
    prompt = engine.chat.bos + "".join(engine.chat.turn(m.role, m.text, m.author).text for m in turns)
    trace = text_trace(fan_of(tiny, problem, id="t"))
    assert [token for message in trace.messages for token in message.tokens] == tiny.encode(prompt)
    at = 0
    for place, message in enumerate(trace.messages):
        assert message.parents == tuple(m.name for m in trace.messages[:place])
        assert message.position == at and message.offsets == tuple(m.position for m in trace.messages[:place])
        at += len(message.tokens)


def learnt(trace: Trace) -> list[int]:
    return [t for m in trace.messages if m.learn is not None for t in m.tokens[m.learn[0] : m.learn[1]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_llama(tmp_path_factory.mktemp("traces")))


@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 10**9),
    layout=st.sampled_from(SYNTHESIS_LAYOUTS),
    mapped=st.booleans(),
    adapter=st.none() | st.just("merge"),
    branches=st.integers(2, 16),
)
def test_any_problem_as_a_trace(model, name, seed, layout, mapped, adapter, branches) -> None:
    task = SYNTHESIS_TASKS[name]
    problem = draw_problem(task.with_branches(min(branches, task.most_branches)), "train", seed)
    parts, fan = Parts.of(problem), fan_of(model, problem, id="t")
    trace = cache_trace(fan, layout, Views(mapped=mapped, adapter=adapter))
    words = [branch.words.name for branch in parts.branches]
    shown = [f"{name} mapped" for name in words] if mapped else words
    trunk = [ROOT, *(message.name for message in parts.trunk)]
    own = [message.name for message in (*parts.asks, parts.answer)]

    answer = trace.by_name[parts.answer.name]
    assert answer.parents == (*trunk, *shown, *own[:-1])
    private = {message.name for branch in parts.branches for message in branch.private}
    assert not private & {parent for name in own for parent in trace.by_name[name].parents}
    assert {m.name for m in trace.messages if m.adapter == "merge"} == (set(own) if adapter else set())
    assert {m.name for m in trace.messages if m.mapped} == (set(shown) if mapped else set())

    lengths = {m.name: len(m.tokens) for m in trace.messages}
    offsets = dict(zip(answer.parents, answer.offsets, strict=True))
    end = sum(lengths[name] for name in trunk)
    native = {
        branch.words.name: end + sum(lengths[message.name] for message in branch.private) for branch in parts.branches
    }
    assert {name: trace.by_name[name].position for name in words} == native
    at = end
    for name, seen in zip(words, shown, strict=True):
        assert offsets[seen] == {"sequential": at, "parallel": end, "native": native[name]}[layout]
        at += lengths[name]
    assert offsets[own[0]] == max(offsets[seen] + lengths[seen] for seen in shown)
    assert answer.position == offsets[own[0]] + lengths[own[0]]

    assert learnt(trace) == learnt(text_trace(fan)) == model.encode(f" {parts.answer.text}") + model.encode("<|end|>")


def test_an_answer_may_be_given_as_tokens_and_must_start_with_its_header(tiny: LoadedModel) -> None:
    problem = uneven("vote", branches=3)
    answer = Parts.of(problem).answer
    said = [*tiny.encode(tiny.chat.header(answer.author)), *tiny.encode(" I do not know."), 2]
    fan = fan_of(tiny, problem, id="t", answer=said)
    assert learnt(cache_trace(fan, "native")) == learnt(text_trace(fan)) == [*tiny.encode(" I do not know."), 2]
    with pytest.raises(TrainingError, match="do not start with the header of its author"):
        fan_of(tiny, problem, id="t", answer=said[1:])
    with pytest.raises(TrainingError, match="do not start with the header of its author 'Bob'"):
        turn_message(tiny, "answer", "assistant", "Yes.", "Bob", learn=True, tokens=said)


def family_model(folder: Path, family: str) -> LoadedModel:
    tokenizer = tokenizer_for(family)
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<|user|>"] * (family == "GLM-4.5"))]
    save_tiny_llama(folder, tokenizer=tokenizer, vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=ends)
    return load_model(folder)


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("Qwen 3", "<|im_end|>"),
        ("Qwen 3 Thinking", "<|im_end|>"),
        ("DeepSeek R1 Distill", "<｜end▁of▁sentence｜>"),
        ("DeepSeek V3.1", "<｜end▁of▁sentence｜>"),
        ("Nemotron Nano 2", "\n<SPECIAL_12>"),
        ("GLM-4.5", "<|user|>"),
    ],
)
@pytest.mark.parametrize("author", [None, "Bob"])
def test_what_a_thinking_model_learns_holds_no_thoughts_and_ends_where_it_stops(
    tmp_path: Path, family: str, end: str, author: str | None
) -> None:
    """As its readers have it, whether it is given as words, or as tokens that an engine has decoded."""
    model = family_model(tmp_path, family)
    chat, encode = model.chat, model.encode
    said = turn_message(model, "answer", "assistant", " Yes.", author, learn=True)
    assert said.learn is not None
    start, stop = said.learn
    assert model.decode([*said.tokens[start:stop]]).lstrip() == f"Yes.{end}"
    assert [*said.tokens[:start]] == encode(chat.assistant.opening(author).rstrip(" "))
    shown = chat.turn("assistant", " Yes.", author).text
    assert model.decode([*said.tokens]) in (shown, f"{shown}{end}"), "nothing but the token that it stops at is added"
    words = encode(chat.turn("assistant", " Yes.", author))[start:]
    for header in (chat.header(author, thinking=False), chat.assistant.opening(author).rstrip(" ")):
        given_ = turn_message(model, "answer", "assistant", "", author, learn=True, tokens=[*encode(header), *words])
        assert given_ == said
    assert chat.thoughts is not None
    half = [*encode(chat.header(None, thinking=True)), *encode("hm"), *words]
    with pytest.raises(TrainingError, match="do not start with the header"):
        turn_message(model, "answer", "assistant", "", author, learn=True, tokens=half)
    assert turn_message(model, "b", "assistant", "Yes.", author).tokens == tuple(
        encode(chat.turn("assistant", "Yes.", author))
    )


def test_traces_of_one_problem_are_the_same_again(tiny: LoadedModel) -> None:
    problem = draw_problem(SYNTHESIS_TASKS["hops"], "train", Random(0).randrange(100))
    assert cache_trace(fan_of(tiny, problem, id="t"), "native") == cache_trace(fan_of(tiny, problem, id="t"), "native")


@given(
    name=st.sampled_from(["hops", "reports"]),
    seed=st.integers(0, 10**9),
    layout=st.sampled_from(SYNTHESIS_LAYOUTS),
    mapped=st.booleans(),
)
def test_what_is_asked_together_is_what_would_be_asked_apart(model, name, seed, layout, mapped) -> None:
    problems = draw_problems(SYNTHESIS_TASKS[name], "train", seed, 4)
    fans = [fan_of(model, problem, id="t") for problem in problems]
    together = asked_together(fans)
    for whole, apart in (
        (
            cache_trace(together, layout, Views(mapped=mapped)),
            [cache_trace(fan, layout, Views(mapped=mapped)) for fan in fans],
        ),
        (text_trace(together), [text_trace(fan) for fan in fans]),
    ):
        assert learnt(whole) == [token for trace in apart for token in learnt(trace)]
        for number, trace in enumerate(apart, start=1):
            names = {one: one if number == 1 else f"{one} {number}" for one in ("ask", "answer")}
            for message in trace.messages:
                there = whole.by_name[names.get(message.name, message.name)]
                parents = tuple(names.get(parent, parent) for parent in message.parents)
                assert there == replace(message, name=there.name, parents=parents)
        assert len(whole.messages) == len(apart[0].messages) + 2 * (len(fans) - 1)


def test_other_branches_are_not_asked_together(tiny: LoadedModel) -> None:
    fans = [fan_of(tiny, draw_problem(SYNTHESIS_TASKS["hops"], "train", seed), id=f"t{seed}") for seed in range(2)]
    with pytest.raises(ValueError, match="the messages of 't0' do not all have its branches"):
        asked_together(fans)


@pytest.mark.parametrize("family", ["Gemma 3", "Llama 2", "Qwen 2.5"])
@pytest.mark.parametrize("role", ["system", "user"])
def test_what_somebody_says_stands_in_a_turn_of_the_template(
    make_engine: MakeEngine, tmp_path: Path, family: str, role: Any
) -> None:
    """Instructions in a user's, where they have no turn of their own."""
    engine = make_engine(model=family_model(tmp_path, family))
    message = ProblemMessage("notes", role, "It is so.", "Bob")
    opening, ending = _Play(engine, SHORT, 0, ["notes"])._around(message)
    written = f"{opening.text} It is so.{ending}"
    assert written == engine.chat.turn(role, "It is so.", "Bob").text
