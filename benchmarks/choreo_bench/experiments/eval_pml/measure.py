"""Asks what was not asked yet, in every way, and keeps every answer."""

from __future__ import annotations

import asyncio
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from choreo_agents.engine import Decode, Engine, Memory, Prefill
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.pml import SchemaLibrary
from choreo_agents.training.journal import Journal, Record
from choreo_agents.workflows.playing import at_once, room
from choreo_bench.evaluation.evaluate import GREEDY
from choreo_bench.experiments.eval_pml.tasks import DocumentQuestion, written
from choreo_bench.language import ProblemMessage, Split, Task, draw_problem

BASELINE, CACHED, ADAPTED = "baseline", "cached", "cached, adapter"
KV_BUDGET_BYTES = 1 << 30
OnProgress = Callable[[], None]


@dataclass(frozen=True)
class Way:
    """A column of a table: one way of answering."""

    name: str
    adapter: Path | None = None
    """A folder: for the question and the answer, and for documents if it has a cache mapper."""
    digest: str = ""
    """Of its files: tells its answers from another's."""

    def key(self, task: str, number: int) -> str:
        """Names an answer in a journal."""
        return f"{self.name} {self.digest} | {task} | {number}" if self.digest else f"{self.name} | {task} | {number}"


def ways(adapter: Path | None) -> list[Way]:
    """All that are compared.

    Raises:
        InvalidRequestError: There is no adapter in that folder.
    """
    return [Way(BASELINE), Way(CACHED), *([] if adapter is None else [Way(ADAPTED, adapter, _digest(adapter))])]


@dataclass(frozen=True)
class Exam:
    """Problems that a model is asked.

    Args:
        model: Speaks the embedded language.
        tasks: Their problems have documents.
        count: Of each task: those of seeds `seed` to `seed + count - 1`.
    """

    model: LoadedModel
    tasks: Sequence[Task]
    count: int
    seed: int = 0
    split: Split = "test"

    def settings(self) -> dict[str, Any]:
        """Return the settings that decide an answer, besides its key in a journal."""
        return {"weights": self.model.adapter.fingerprint, "split": self.split}

    def numbers(self) -> range:
        return range(self.seed, self.seed + self.count)

    def take(self, way: Way, journal: Journal, on_progress: OnProgress = lambda: None) -> dict[str, list[Record]]:
        """Every problem's record, by task; what the journal does not hold is asked.

        Raises:
            AdapterError: The adapter is another model's, or its files are damaged.
        """
        keys = {(task.name, number): way.key(task.name, number) for task in self.tasks for number in self.numbers()}
        left = [(task, n) for task in self.tasks for n in self.numbers() if keys[task.name, n] not in journal]
        for _ in range(len(keys) - len(left)):
            on_progress()
        if left:
            with _answering(self.model, way) as answering:

                async def ask(task: Task, number: int) -> None:
                    problem = draw_problem(task, self.split, number)
                    query = DocumentQuestion.of(problem, f"{task.name}-{number}")
                    record = await answering.answer(query)
                    score = problem.score({query.parts.answer.name: record["answer"]})
                    journal.add(keys[task.name, number], {"score": score, **record})
                    on_progress()

                asyncio.run(at_once([partial(ask, *pair) for pair in left], room(answering.engine)))
        return {
            task.name: [journal.records[keys[task.name, number]] for number in self.numbers()] for task in self.tasks
        }


class Answerer(Protocol):
    """Answers a problem's question in one way."""

    engine: Engine

    @abstractmethod
    async def answer(self, query: DocumentQuestion) -> Record:
        """The words, and how many tokens of the prompt were encoded beforehand and with it."""
        ...


@contextmanager
def _answering(model: LoadedModel, way: Way) -> Iterator[Answerer]:
    method: Any = "naive" if way.name == BASELINE else "choreo"
    with Engine.load(model, method=method, memory=Memory(kv_budget_bytes=KV_BUDGET_BYTES)) as engine:
        if way.name == BASELINE:
            yield FromPlainText(engine)
            return
        adapter = None if way.adapter is None else engine.load_adapter(way.adapter)
        with SchemaLibrary(engine) as library:
            yield FromModules(library) if adapter is None else FromAdaptedModules(library, adapter)


class FromPlainText:
    """Everything is one ordinary prompt, in which everything attends to all before it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def answer(self, query: DocumentQuestion) -> Record:
        """Answer a question (see the base class)."""
        [prompt] = await self.engine.aprefill([Prefill(query.as_text(self.engine.chat))])
        [answer] = await self.engine.adecode([_decode(self.engine, query.parts.answer, [prompt])])
        return _note(self.engine, query, [prompt, answer], 0, prompt.length)


class FromModules:
    """Documents are modules, each encoded after the schema's own text alone; the question is encoded with the prompt.

    Args:
        library: Of nothing else.
    """

    def __init__(self, library: SchemaLibrary) -> None:
        self.library, self.engine = library, library.engine

    async def answer(self, query: DocumentQuestion) -> Record:
        """Answer a question (see the base class)."""
        self.library.register(query.schema)
        try:
            with await asyncio.to_thread(self.library.assemble, query.prompt) as view:
                call = _decode(self.engine, query.parts.answer, view.handles, view.offsets, view.end)
                [answer] = await self.engine.adecode([call])
                return _note(self.engine, query, [answer], view.cached_tokens, view.fresh_tokens)
        finally:
            self.library.forget(query.schema.name)


class FromAdaptedModules:
    """The same, with an adapter for the question and the answer, and its cache mapper, if any, for the documents.

    Args:
        library: Of nothing else.
        adapter: Its name; the modules are encoded without it.
    """

    def __init__(self, library: SchemaLibrary, adapter: str) -> None:
        self.library, self.engine, self.adapter = library, library.engine, adapter

    async def answer(self, query: DocumentQuestion) -> Record:
        """Answer a question (see the base class)."""
        self.library.register(query.schema)
        made: list[MessageHandle] = []
        try:
            with await asyncio.to_thread(self.library.assemble, query.documents) as view:
                own, *documents = view.handles
                if self.engine.branches.maps(self.adapter):
                    # Copies go with the modules that they are of, which problems may share.
                    documents = await self.engine.branches.amap(documents, self.adapter)
                first, *anchors = [at or 0 for at in view.offsets]
                calls = self.engine.branches.boundaries(documents, [own], [first], anchors, self.adapter)
                behind = await self.engine.aprefill(calls) if calls else []
                made += behind
                ends = [at + document.length for at, document in zip(anchors, documents, strict=True)]
                documents, offsets = [*documents, *behind], [*view.offsets, *ends[: len(behind)]]
                question = written(self.engine.chat, query.parts.asks)
                context = [own, *documents], offsets, view.end
                fresh = await self.engine.aprefill(question, *context, role="user", adapter=self.adapter)
                made.append(fresh)
                handles, offsets = [own, *documents, fresh], [*offsets, view.end]
                end = view.end + fresh.length
                call = _decode(self.engine, query.parts.answer, handles, offsets, end, self.adapter)
                [answer] = await self.engine.adecode([call])
                return _note(self.engine, query, [answer], view.cached_tokens, fresh.length)
        finally:
            for handle in made:
                self.engine.release(handle)
            self.library.forget(query.schema.name)


def _decode(engine: Engine, answer: ProblemMessage, handles: Sequence[MessageHandle], *places: Any) -> Decode:
    """A call that says the answer after a view: its offsets, its end, and the adapter, as far as there are any."""
    offsets, end, adapter = (*places, None, None, None)[:3]
    chat = engine.chat
    return Decode(
        chat.header(answer.author), handles, offsets, end, sampling=GREEDY, author=answer.author,
        turn_suffix=chat.turn_end, adapter=adapter,
    )  # fmt: skip


def _note(engine: Engine, query: DocumentQuestion, handles: Sequence[MessageHandle], cached: int, fresh: int) -> Record:
    """Make the record of an answer, and release all messages."""
    header = len(engine.model.encode(engine.chat.header(query.parts.answer.author)))
    words = engine.model.decode(engine.tokens(handles[-1])[header:], special=False).strip()
    for handle in handles:
        engine.release(handle)
    return {"answer": words, "cached_tokens": cached, "fresh_tokens": fresh}


def _digest(folder: Path) -> str:
    """Tells an adapter from others by its files; raises `InvalidRequestError` if there are none."""
    files = sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
    if not files:
        raise InvalidRequestError(f"{str(folder)!r} is not an adapter's folder: `choreo train synthesizer` writes one")
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
