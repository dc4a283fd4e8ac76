"""Examples for a synthesizer: dialogue cut into branches, synthesis tasks, and answers sampled from its text twin.

The three sources of Parallel-Synthesis, each endless and decided by its seed: example k is the same whatever was drawn
before, so that a run can go on anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count, pairwise

from choreo_agents.engine import Engine
from choreo_agents.models import LoadedModel
from choreo_agents.models.chat.format import Role
from choreo_agents.sampling import Sampling
from choreo_agents.training.synthesis_traces import (
    QUESTIONS,
    BranchExample,
    Views,
    asked_together,
    boundaries_of,
    root_of,
    turn_message,
)
from choreo_agents.training.trace import TraceMessage
from choreo_agents.training.tuning import Example
from choreo_agents.workflows.playing import at_once, room
from choreo_bench.embedded.recipe import MIX
from choreo_bench.embedded.transcripts import Transcript, TranscriptTurn, draw_made
from choreo_bench.evaluation.evaluate import LONGEST_ANSWER
from choreo_bench.evaluation.merging import Merged, play_synthesis
from choreo_bench.language import Problem, ProblemMessage, draw_problems
from choreo_bench.language.sentences import draw_facts, notes_text
from choreo_bench.language.synthesis import HELD_OUT, SYNTHESIS_TASKS, Parts, SynthesisTask
from choreo_bench.language.synthesis.tasks import MOST_IN_TRAINING

LEARNT_TASKS: Mapping[str, SynthesisTask] = {n: task for n, task in SYNTHESIS_TASKS.items() if n != HELD_OUT}
"""All synthesis tasks but the one that is held out."""
DIALOGUE: Mapping[str, float] = {name: share for name, share in MIX.items() if name != "multi_document"}
"""The mix that dialogue is cut from: the embedded model's own, without the questions on documents, which is what the
held-out task asks; of all examples three in a thousand still look up what a branch says, in `recall`."""
WEIGHTS: Mapping[str, float] = {"dialogue": 0.1, "tasks": 0.75, "distilled": 0.15}
"""The share of each source among the examples."""
OFTENER: Mapping[str, float] = {"sum": 5.0, "union": 5.0, "vote": 5.0, "monitors": 3.0, "hops": 1.5}
"""How much oftener than others tasks are drawn that take longest to learn."""
NOTED = 0.5
"""Share of a dialogue's branches that have private notes."""
MOST_NOTED = 5
"""Facts in them."""


def dialogue(
    model: LoadedModel,
    *,
    seed: int = 0,
    first: int = 0,
    views: Views = Views(),
    hardness: float = 1.0,
) -> Iterator[Example]:
    """Transcripts whose middle turns are cut into branches, each encoded after the trunk only; the rest is learnt.

    Args:
        model: Its tokenizer and chat turns.
        seed: Decides every example together with its number.
        first: The number of the first.
        views: How they are shown.
        hardness: Of the problems, 0 to 1.
    """
    for number in count(first):
        rng = random.Random(f"synthesis dialogue {seed} {number}")
        fan = None
        while fan is None:
            made = draw_made(rng, DIALOGUE, hardness)
            fan = cut(model, rng, rng.choice(made), id=f"dialogue {seed} {number}")
        yield views.example(fan, rng)


def tasks(
    model: LoadedModel,
    *,
    seed: int = 0,
    first: int = 0,
    views: Views = Views(),
    among: Mapping[str, SynthesisTask] = LEARNT_TASKS,
    hardness: float = 1.0,
    questions: int = QUESTIONS,
) -> Iterator[Example]:
    """Synthesis problems of the train split at varied difficulty, with what would be right for an answer.

    Args:
        model: As for `dialogue`, whose `seed`, `first` and `views` are meant too.
        seed: See there.
        first: See there.
        views: See there.
        among: Tasks (see `OFTENER`).
        hardness: 0 to 1; at 1 there are 2 to 8 branches.
        questions: Asked of one set of branches at most, where a task has several.
    """
    for number in count(first):
        problems = draw_training_problems(seed, number, among, hardness, questions)
        rng = random.Random(f"synthesis views {seed} {number}")
        fans = [fan_of(model, problem, id=f"{problem.task} {seed} {number}") for problem in problems]
        yield views.example(asked_together(fans), rng)


def distilled(
    engine: Engine,
    *,
    seed: int = 0,
    first: int = 0,
    views: Views = Views(),
    among: Mapping[str, SynthesisTask] = LEARNT_TASKS,
    hardness: float = 1.0,
    temperature: float = 1.0,
    batch: int = 64,
    most: int | None = None,
) -> Iterator[Example]:
    """The problems of `tasks` with right answers that the text synthesizer gives; others are left out.

    Not for threads with a running event loop (see `asample_answers`).

    Args:
        engine: Of the method `baseline`; its model is the teacher.
        seed: As for `tasks`, of which all else is meant too.
        first: See there.
        views: See there.
        among: See there.
        hardness: See there.
        temperature: At which answers are sampled.
        batch: Problems that are answered together.
        most: Problems that are tried; None: it goes on for ever, also with a teacher that is never right.

    Raises:
        ValueError: The engine does not re-encode text.
    """
    for start in count(first, batch) if most is None else range(first, first + most, batch):
        numbers = range(start, start + batch if most is None else min(start + batch, first + most))
        drawn = [draw_training_problems(seed, number, among, hardness, source="distilled") for number in numbers]
        problems = [problem for [problem] in drawn]
        answers = asyncio.run(asample_answers(engine, problems, temperature=temperature, seeds=numbers))
        for number, problem, answer in zip(numbers, problems, answers, strict=True):
            # What the teacher gets wrong is nothing to learn.
            if answer is not None and _right(engine, problem, answer):
                rng = random.Random(f"synthesis views {seed} {number}")
                name = f"{problem.task} {seed} {number} distilled"
                yield views.example(fan_of(engine.model, problem, id=name, answer=answer), rng)


async def asample_answers(
    engine: Engine, problems: Sequence[Problem], *, temperature: float = 1.0, seeds: Sequence[int]
) -> list[tuple[int, ...] | None]:
    """Sample a text synthesizer's answers, as all tokens of their messages; None where one did not end by itself.

    Args:
        engine: Of the method `baseline` or `naive`.
        problems: Synthesis problems, played together.
        temperature: At which tokens are sampled; 0: the likeliest.
        seeds: Of each problem's sampling.

    Raises:
        ValueError: The engine reads caches, or there are not as many seeds as problems.
    """
    if engine.method == "choreo":
        raise ValueError("a teacher reads text: pass an engine with the method 'baseline', not 'choreo'")
    sampling = Sampling(temperature=temperature, max_tokens=LONGEST_ANSWER)

    async def one(problem: Problem, seed: int) -> Merged:
        return await play_synthesis(engine, problem, sampling=sampling, seed=seed)

    jobs = [partial(one, problem, seed) for problem, seed in zip(problems, seeds, strict=True)]
    return [merged.tokens if merged.ended else None for merged in await at_once(jobs, room(engine))]


def _right(engine: Engine, problem: Problem, answer: Sequence[int]) -> bool:
    last = Parts.of(problem).answer
    header = engine.model.encode(engine.chat.header(last.author))
    words = engine.model.decode(list(answer[len(header) :]), special=False).strip()
    return problem.score({last.name: words}) >= 1.0


def draw_training_problems(
    seed: int,
    number: int,
    among: Mapping[str, SynthesisTask],
    hardness: float,
    questions: int = 1,
    source: str = "tasks",
) -> list[Problem]:
    """Draw a problem of the train split, and others with its branches, from any task; sources share no problem."""
    rng = random.Random(f"synthesis {source} {seed} {number}")
    names = sorted(among)
    [name] = rng.choices(names, [OFTENER.get(name, 1.0) for name in names])
    task = among[name].varied(rng, hardness)
    return draw_problems(task, "train", rng.getrandbits(48), questions)


def cut(model: LoadedModel, rng: random.Random, transcript: Transcript, *, id: str) -> BranchExample | None:  # noqa: A002
    """A transcript as a trunk, branches and a rest; None if it has not enough turns.

    turns    0 1 | 2 | 3 4 | 5 | 6 7 8
    trunk    0 1                             at most two
    branches       2   3 4   5               2 to 8, each one message
    rest                         6 7 8       at least one of them is learnt
    """
    learnt = [place for place, turn in enumerate(transcript) if turn.learn]
    if not learnt or learnt[-1] < 2:
        return None
    trunk = rng.randint(0, min(2, learnt[-1] - 2))
    rest = rng.randint(trunk + 2, learnt[-1])
    branches = rng.randint(2, min(MOST_IN_TRAINING, rest - trunk))
    edges = [trunk, *sorted(rng.sample(range(trunk + 1, rest), branches - 1)), rest]
    fanned = []
    for number, (start, end) in enumerate(pairwise(edges), start=1):
        spans = [_span(model, f"turn {place}", transcript[place]) for place in range(start, end)]
        tokens = tuple(token for one in spans for token in one.tokens)
        words = TraceMessage(f"branch {number}", tokens, author=spans[0].author, role=spans[0].role)
        fanned.append((_notes(model, rng, number), words))
    return BranchExample(
        id,
        (*root_of(model), *(_span(model, f"turn {place}", turn) for place, turn in enumerate(transcript[:trunk]))),
        tuple(fanned),
        tuple(
            _span(model, f"turn {place}", turn, turn.learn) for place, turn in enumerate(transcript) if place >= rest
        ),
        boundaries_of(model, [words for _, words in fanned]),
    )


def _notes(model: LoadedModel, rng: random.Random, number: int) -> tuple[TraceMessage, ...]:
    """Draw the private prompt of one branch: nothing, or facts."""
    if rng.random() >= NOTED:
        return ()
    facts = draw_facts(rng, rng.randint(1, MOST_NOTED))
    return (turn_message(model, f"notes {number}", "system", notes_text(facts)),)


def _span(model: LoadedModel, name: str, turn: TranscriptTurn, learn: bool = False) -> TraceMessage:
    role: Role = "system" if turn.role == "system" else "user" if turn.role == "user" else "assistant"
    return turn_message(model, name, role, turn.text, turn.author, learn=learn)


def fan_of(model: LoadedModel, problem: Problem, *, id: str, answer: Sequence[int] | None = None) -> BranchExample:  # noqa: A002
    """Make the tokens of a synthesis problem's messages, as an engine would encode them.

    Args:
        model: Its tokenizer and chat turns.
        problem: A synthesis problem.
        id: Of the traces that are made of it.
        answer: All tokens of the answer's message, its header included; None: what would be right.

    Raises:
        ValueError: It is no synthesis problem.
        TrainingError: The tokens do not start with the header that a decode starts with.
    """
    parts = Parts.of(problem)
    last = parts.answer
    answer_span = turn_message(model, last.name, last.role, last.text, last.author, learn=True, tokens=answer)
    branches = tuple(
        (tuple(_given(model, message) for message in branch.private), _given(model, branch.words))
        for branch in parts.branches
    )
    return BranchExample(
        id,
        (*root_of(model), *(_given(model, message) for message in parts.trunk)),
        branches,
        (*(_given(model, message) for message in parts.asks), answer_span),
        boundaries_of(model, [words for _, words in branches]),
    )


def _given(model: LoadedModel, message: ProblemMessage) -> TraceMessage:
    return turn_message(model, message.name, message.role, message.text, message.author)
