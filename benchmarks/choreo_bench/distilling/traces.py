"""Traces of a workflow as the baseline runs it, placed as choreo would; and how good a tuned model plays it.

The words are sampled by the baseline, then forced on a choreographed run of the same graph (Prompt Choreography,
section 3.2): so a trace has the words of one and the views of the other.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

from choreo_agents.engine import Engine, Memory
from choreo_agents.errors import InvalidRequestError, KVBudgetError
from choreo_agents.graph.view.call_id import Replay
from choreo_agents.models import LoadedModel
from choreo_agents.training.journal import Journal
from choreo_agents.training.trace import Trace, add_traces, digest_of, handles_in, record, text_twin
from choreo_agents.training.tuned import TUNED
from choreo_agents.training.tuning import Example
from choreo_agents.workflows.answers import read_answer
from choreo_agents.workflows.cases import Case, Item, Variant
from choreo_agents.workflows.phrasing import Prompts
from choreo_agents.workflows.playing import Setup, at_once, play, room, run_graph, sampled, seeds_of
from choreo_bench.language import Split
from choreo_bench.playing import draw_items

CHUNK = 64
"""Traces that are sampled before they are written down."""
SALT = "traces"
"""No secret: a trace calls its messages as their handles are, which must be the same when a recording goes on."""


@dataclass(frozen=True)
class DistillConfig:
    """The workflow to distil, in one variant that reads caches."""

    setup: Setup
    variant: str
    source: Setup | None = None
    """The workflow whose answer is taught, in the last words that state it: for a single call to say it at once."""
    own: Mapping[Split, Sequence[Item]] | None = None
    """The user's items to learn from and to be judged by; None: they are drawn from the embedded language."""

    @property
    def served(self) -> Variant:
        """The variant.

        Raises:
            InvalidRequestError: There is none of that name, or it does not read caches.
        """
        variants = self.setup.case.variants
        cached = [name for name, variant in variants.items() if variant.method == "choreo"]
        if self.variant not in cached:
            raise InvalidRequestError(
                f"{self.setup.case.name} has no variant {self.variant!r} that reads caches: use {', '.join(cached)}"
            )
        return variants[self.variant]

    def items(self, split: Split, count: int, seed: int = 0) -> list[Item]:
        """Return the items to learn from or to be judged by; of the user's own, as many as there are."""
        if self.own is not None:
            return list(self.own[split][:count])
        return draw_items(self.setup.case, self.setup.changed(self.served).options, count, split, seed)

    def seeds(self, items: Sequence[Item], seed: int) -> Sequence[int]:
        """Return the seeds of the items' runs."""
        return range(seed, seed + len(items)) if self.own is None else seeds_of(items, seed)

    @property
    def digest(self) -> str:
        """Tells the user's own items from others; empty for drawn ones."""
        if self.own is None:
            return ""
        texts = [item.model_dump_json() for split in sorted(self.own) for item in self.own[split]]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def usual_variant(case: Case) -> str:
    """Choose the variant that is distilled unless another is named: the one that loses most of several."""
    cached = [name for name, variant in case.variants.items() if variant.method == "choreo"]
    return "parallel" if "parallel" in cached else cached[0]


def divided(items: Sequence[Item], held_out: int) -> dict[Split, Sequence[Item]]:
    """The user's own items: the last ones judge, at most a third of them.

    Raises:
        InvalidRequestError: There are fewer than two.
    """
    if len(items) < 2:
        raise InvalidRequestError(f"{len(items)} items are too few for training and evaluation: pass at least two")
    judging = max(1, min(held_out, len(items) // 3))
    return {"train": items[:-judging], "dev": items[-judging:]}


def sample_traces(
    model: LoadedModel,
    lesson: DistillConfig,
    items: Sequence[Item],
    journal: Journal,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    kv_budget_bytes: int = 1 << 30,
    on_progress: Callable[[int], None] = lambda done: None,
) -> dict[str, str]:
    """Sample a trace of each item that the journal does not hold yet.

    What is no fault of an item, as too little KV memory, ends it: started again, it samples the rest.

    Args:
        model: Says the words.
        lesson: How they are placed.
        items: What is played.
        journal: Gets the traces, a chunk at a time.
        temperature: Of all that is said.
        seed: Of the first item's run.
        kv_budget_bytes: Of each engine.
        on_progress: Told how many are over.

    Returns:
        Why an item has no trace, by its id: its view outgrows the model's context, say.
    """
    served = lesson.served
    sampling = lesson.setup.sampling.model_copy(update={"temperature": temperature, "top_p": 1.0})
    placed = replace(lesson.setup, sampling=sampling).changed(served)
    taught = placed if lesson.source is None else replace(lesson.source, sampling=sampling)
    left = [
        (item, item_seed)
        for item, item_seed in zip(items, lesson.seeds(items, seed), strict=True)
        if item.id not in journal
    ]
    left_out: dict[str, str] = {}
    done = len(items) - len(left)
    on_progress(done)
    with (
        Engine.load(model, method="baseline", memory=Memory(kv_budget_bytes=kv_budget_bytes)) as teacher,
        Engine.load(model, method=served.method, memory=Memory(kv_budget_bytes=kv_budget_bytes), salt=SALT) as student,
    ):
        most = min(CHUNK, room(teacher), room(student))
        for first in range(0, len(left), most):
            chunk = left[first : first + most]
            jobs = [partial(_trace_or_reason, teacher, student, taught, placed, item, own) for item, own in chunk]
            made = asyncio.run(at_once(jobs, most))
            add_traces(journal, [trace for trace in made if isinstance(trace, Trace)])
            left_out |= {
                item.id: reason for (item, _), reason in zip(chunk, made, strict=True) if isinstance(reason, str)
            }
            done += len(chunk)
            on_progress(done)
    return left_out


async def _trace_or_reason(
    teacher: Engine, student: Engine, taught: Setup, placed: Setup, item: Item, seed: int
) -> Trace | str:
    """A trace, or why the item has none."""
    try:
        return await _trace(teacher, student, taught, placed, item, seed)
    except KVBudgetError:
        raise
    except InvalidRequestError as error:
        return str(error)


async def _trace(teacher: Engine, student: Engine, taught: Setup, placed: Setup, item: Item, seed: int) -> Trace:
    """Record a trace of one item: with the text of `taught`, or, if that is another workflow, with its answer."""
    # The options of the variant decide the graph under both: the baseline only reads it as text.
    options = placed.options if taught.case is placed.case else taught.options
    made = taught.case.play(item, options, taught.prompts, taught.sampling)
    with teacher.scope():
        state, _ = await run_graph(teacher, made.graph, made.messages, seed=seed)
        tokens = sampled(teacher, state)
    if taught.case is not placed.case:
        judged = taught.case.judge(item, options, taught.prompts, state).answer
        last = _ending(teacher, taught.prompts, tokens, judged)
        tokens = defaultdict(lambda: last)
    made = placed.case.play(item, placed.options, placed.prompts, placed.sampling)
    with student.scope():
        state, _ = await run_graph(student, made.graph, made.messages, replay=tokens, seed=seed)
        return record(student, item.id, handles_in(state["handles"]))


def _ending(engine: Engine, prompts: Prompts, replay: Replay, judged: str) -> tuple[int, ...]:
    """The last words that state the answer which a run was judged by.

    Raises:
        InvalidRequestError: Nobody says it.
    """
    where = prompts("answer")
    wanted = read_answer(judged, where)
    for _, tokens in sorted(replay.items(), key=lambda one: (one[0][1], one[0]), reverse=True):
        if tokens and wanted and read_answer(engine.model.decode(list(tokens), special=False), where) == wanted:
            return tokens
    raise InvalidRequestError("no agent has an answer to train on")


class FixedExamples:
    """The same examples in every epoch.

    Args:
        traces: Of which every message is the adapter's.
        taught: Whether the model's own distributions over ordinary prompts stand beside.
    """

    def __init__(self, traces: Sequence[Trace], *, taught: bool = False) -> None:
        self._examples = [
            Example(adapted(trace), text_twin(trace) if taught else None) for trace in traces if trace.learnt_tokens
        ]
        self.digest = digest_of(traces)

    def epoch(self, number: int) -> Sequence[Example]:
        return self._examples


def adapted(trace: Trace) -> Trace:
    """The same trace with every message encoded by the adapter that is trained."""
    return Trace(trace.id, tuple(replace(message, adapter=TUNED) for message in trace.messages))


def score_played(
    model: LoadedModel,
    lesson: DistillConfig,
    items: Sequence[Item],
    adapter: Path | None,
    *,
    seed: int = 0,
    kv_budget_bytes: int = 1 << 30,
) -> float:
    """The mean score of a variant with an adapter; an item that cannot be played is wrong."""
    served = lesson.served
    setup = lesson.setup.changed(served)
    seeds = lesson.seeds(items, seed)
    with Engine.load(
        model, method=served.method, memory=Memory(kv_budget_bytes=kv_budget_bytes), adapter=adapter
    ) as engine:

        async def score(item: Item, own: int) -> float:
            try:
                result, _, _ = await play(engine, setup, item, seed=own)
            except KVBudgetError:
                raise
            except InvalidRequestError:
                return 0.0
            return result.score or 0.0

        jobs = [partial(score, item, own) for item, own in zip(items, seeds, strict=True)]
        return mean(asyncio.run(at_once(jobs, room(engine))))
