"""Times the first token about branches in every way there is; what is known already is not timed again."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from choreo_agents.engine import Engine, Memory, Prefill, Scheduling, StreamedToken
from choreo_agents.engine.adapters import BASE
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.synthesis.placing import Strategy
from choreo_agents.training.journal import Journal, Record
from choreo_bench.competitors import PlainGenerate
from choreo_bench.timing import rest

Way = Literal[
    "parallel",
    "parallel, mapped now",
    "parallel, mapped before",
    "sequential",
    "sequential, mapped now",
    "sequential, mapped before",
    "text, prefix cache",
    "HF generate",
]
WAYS: tuple[Way, ...] = get_args(Way)
TEXT, PLAIN = WAYS[-2:]
MERGES = WAYS[:-2]
"""From caches."""
MAPPER = "mapper"
REPEATS = 5
"""Timed runs of a way, after one that is not counted, ..."""
DEAR_TOKENS = 4096
"""... but one alone where it encodes more than these."""
_ENCODED = ("tokens_encoded", "tokens_recomputed")
_STEP_TOKENS = 4096
OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """Numbers of branches and tokens that are merged."""

    branches: int = 4
    length: int = 1024
    """Of each branch."""
    trunk: int = 256
    """What all workers and the synthesizer see, ..."""
    context: int = 64
    """... and what each worker sees besides: its branch has read it, the synthesizer does not."""
    question: int = 64
    header: int = 4

    @property
    def prompt(self) -> int:
        """Tokens that the synthesizer reads."""
        return self.trunk + self.branches * self.length + self.question + self.header

    @property
    def room(self) -> int:
        """Tokens of KV for all of it, copies of the branches, and what rounding takes."""
        messages = 3 * self.branches + 8
        return self.prompt + self.branches * (self.length + self.context) + 128 * messages


def key_of(sizes: Sizes, way: Way) -> str:
    """Names a cell in a journal."""
    return f"{sizes.branches} x {sizes.length} | {way}"


class BranchWords:
    """Random tokens; those of branches are others for each run, so that no prefix cache knows them.

    Args:
        sizes: How many.
        vocabulary: From which ids are drawn.
    """

    def __init__(self, sizes: Sizes, vocabulary: int) -> None:
        self.sizes = sizes
        self._vocabulary = vocabulary
        self.trunk, self.question = self.draw("trunk", sizes.trunk), self.draw("question", sizes.question)
        self.header = self.draw("header", sizes.header)

    def draw(self, name: str, count: int) -> list[int]:
        """So many tokens, the same for a name."""
        rng = random.Random(f"{self.sizes} {name}")
        return [rng.randrange(3, self._vocabulary) for _ in range(count)]

    def branches(self, run: int) -> list[list[int]]:
        return [self.draw(f"branch {run} {i}", self.sizes.length) for i in range(self.sizes.branches)]


@dataclass(frozen=True)
class SynthesisBench:
    """Timer of merges on one model.

    Args:
        model: Serves both engines.
        path: Its folder, for Hugging Face.
        dtype: Of weights and KV.
    """

    model: LoadedModel
    path: Path
    dtype: torch.dtype
    repeats: int = REPEATS

    def measure(
        self, sizes: Sizes, journal: Journal, ways: Sequence[Way] = WAYS, on_progress: OnProgress = lambda key: None
    ) -> list[Record]:
        """Time what the journal does not hold yet; each way's figures are written when they are known.

        Args:
            sizes: What is merged.
            journal: Gets a record of each way.
            ways: That are timed.
            on_progress: Told of every way that is over, or was before.

        Returns:
            The records of these ways: a journal may hold more.
        """
        words = BranchWords(sizes, self.model.adapter.vocabulary_size)
        keys = {way: key_of(sizes, way) for way in ways}
        todo = [way for way in ways if keys[way] not in journal]
        for way in ways:
            if way not in todo:
                on_progress(keys[way])
        for cells, timing in ((MERGES, self._merges), (WAYS[-2:-1], self._text), (WAYS[-1:], self._plain)):
            wanted = [way for way in todo if way in cells]
            for way, record in timing(words, wanted) if wanted else ():
                cell = {"branches": sizes.branches, "length": sizes.length, "way": way}
                journal.add(keys[way], {**cell, "prompt_tokens": sizes.prompt, **record})
                on_progress(keys[way])
        return [journal.records[key] for key in keys.values()]

    def _merges(self, words: BranchWords, ways: Sequence[Way]) -> Iterator[tuple[Way, Record]]:
        """All from the same branches, which were encoded before the clock starts."""
        with self._engine(words.sizes, "choreo") as engine, tempfile.TemporaryDirectory() as folder:
            adapter = engine.model.adapter
            _random_mapper(self.model).save(Path(folder), adapter.weights)
            engine.load_adapter(folder, MAPPER)
            branches = _workers(engine, words, 0)
            for way in ways:
                yield way, _repeated(partial(_merged, engine, branches, words, way), self.repeats)

    def _text(self, words: BranchWords, ways: Sequence[Way]) -> Iterator[tuple[Way, Record]]:
        """Time one prompt of text. The prefix cache holds only its trunk: workers spoke after contexts of their own."""
        with self._engine(words.sizes, "baseline") as engine:
            trunk = engine.prefill(words.trunk)
            engine.decode(words.header, [trunk], sampling=_ONE)

            def run(number: int) -> Record:
                return _first_token(engine, _workers(engine, words, number), words, "text", BASE)

            for way in ways:
                yield way, self._few(run, words.sizes)

    def _plain(self, words: BranchWords, ways: Sequence[Way]) -> Iterator[tuple[Way, Record]]:
        plain = PlainGenerate(self.path, self.dtype, str(self.model.adapter.device))
        plain.first_token_s(words.trunk)

        def run(number: int) -> Record:
            branches = [token for branch in words.branches(number) for token in branch]
            prompt = [*words.trunk, *branches, *words.question, *words.header]
            return {
                "first_token_s": plain.first_token_s(prompt),
                "tokens_encoded": len(prompt),
                "tokens_mapped": 0,
            }

        for way in ways:
            yield way, self._few(run, words.sizes)

    def _few(self, run: Callable[[int], Record], sizes: Sizes) -> Record:
        cheap = sizes.prompt <= DEAR_TOKENS
        return _repeated(run, self.repeats if cheap else 1, warm_up=cheap)

    @contextmanager
    def _engine(self, sizes: Sizes, method: Literal["choreo", "baseline"]) -> Iterator[Engine]:
        budget = 2 * sizes.room * self.model.adapter.geometry.bytes_per_token
        with Engine.load(
            self.model,
            method=method,
            memory=Memory(kv_budget_bytes=budget),
            scheduling=Scheduling(max_batched_tokens=_STEP_TOKENS),
        ) as engine:
            yield engine


_ONE = Sampling(temperature=0.0, max_tokens=1, stop_tokens=())


def _workers(engine: Engine, words: BranchWords, run: int) -> list[MessageHandle]:
    """Return the handles of what workers said, each after the trunk and its own context."""
    trunk = engine.prefill(words.trunk)
    own = [words.draw(f"context {i}", words.sizes.context) for i in range(words.sizes.branches)]
    contexts = engine.prefill([Prefill(tokens, [trunk]) for tokens in own])
    return [
        engine.prefill(tokens, [trunk, context], author=f"worker {i}", role="assistant")
        for i, (tokens, context) in enumerate(zip(words.branches(run), contexts, strict=True))
    ]


def _merged(engine: Engine, branches: Sequence[MessageHandle], words: BranchWords, way: Way, _: int) -> Record:
    """Time one merge from caches."""
    strategy: Strategy = "parallel" if way.startswith("parallel") else "sequential"
    name = MAPPER if "mapped" in way else BASE
    if name == MAPPER:
        copies = engine.branches.map(branches, name)
        for copy in copies if way.endswith("now") else ():
            engine.release(copy)
    return _first_token(engine, branches, words, strategy, name)


def _first_token(
    engine: Engine, branches: Sequence[MessageHandle], words: BranchWords, strategy: Strategy, adapter: str
) -> Record:
    """Seconds from the call to the first token, the question's encoding included; and what the whole merge cost."""

    async def run() -> float:
        started, took = time.perf_counter(), 0.0
        view = await engine.branches.aview(branches, words.question, strategy=strategy, adapter=adapter)
        async for item in engine.astream(words.header, view.handles, view.offsets, view.end, sampling=_ONE):
            if isinstance(item, StreamedToken):
                took = time.perf_counter() - started
            else:
                engine.release(item)
        for handle in view.owned:
            engine.release(handle)
        return took

    rest()
    before = engine.stats()
    took = asyncio.run(run())
    after = engine.stats()
    return {
        "first_token_s": took,
        "tokens_encoded": sum(getattr(after, name) - getattr(before, name) for name in _ENCODED),
        "tokens_mapped": after.tokens_mapped - before.tokens_mapped,
    }


def _repeated(run: Callable[[int], Record], repeats: int, *, warm_up: bool = True) -> Record:
    """The counts of one run, the times of all but the first."""
    records = [run(number) for number in range(1, repeats + 1 + warm_up)]
    return {**records[-1], "first_token_s": [record["first_token_s"] for record in records[warm_up:]]}


def _random_mapper(model: LoadedModel) -> CacheMapper:
    """Make a random mapper of the usual rank: it costs what a trained one does."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mapper = CacheMapper(model.adapter.geometry, model.adapter.kinds)
        for parameter in mapper.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    return mapper
