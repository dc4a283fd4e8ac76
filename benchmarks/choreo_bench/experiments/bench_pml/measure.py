"""Times first tokens from every memory; what is known already is not timed again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import torch

from choreo_agents.models import LoadedModel
from choreo_agents.training.journal import Journal, Record
from choreo_bench.experiments.bench_pml.cases import PromptCase
from choreo_bench.rivals import PlainGenerate
from choreo_bench.timing.prompts import PromptTimer, Source

Way = Literal["text", "HF generate", "disk", "host", "device", "host copy"]
"""Where modules are: nowhere, so that the engine or Hugging Face encodes everything; on disk, on the host, on the
device. Last, no first token but a part of that from the host: the copy of its modules to the device, by itself."""
WAYS: tuple[Way, ...] = get_args(Way)
WHOLE: tuple[Way, ...] = ("text", "HF generate")
PLACES: tuple[Source, ...] = ("disk", "host", "device")
REPEATS = 5
"""Timed rounds, in which the ways take turns, after one that is not counted, ..."""
DEAR_TOKENS = 8192
"""... but one alone of what encodes more than these."""
REST_S = 0.2
"""Between two runs: the threads of the one before may spin for a while."""
OnProgress = Callable[[str, Way], None]


def key_of(case: PromptCase, way: Way, number: int) -> str:
    """Names a run in a journal."""
    return f"{case.name} | {way} | {number}"


@dataclass(frozen=True)
class ModuleBench:
    """What is timed, and on what.

    Args:
        model: Serves both engines.
        path: Its folder, for Hugging Face; None: that is left out.
        dtype: Of weights and KV.
        repeats: Timed rounds.
    """

    model: LoadedModel
    path: Path | None
    dtype: torch.dtype
    repeats: int = REPEATS

    @property
    def ways(self) -> list[Way]:
        """That are timed."""
        return [way for way in WAYS if self.path is not None or way != "HF generate"]

    @cached_property
    def rival(self) -> PlainGenerate:
        """Hugging Face, ready."""
        assert self.path is not None
        rival = PlainGenerate(self.path, self.dtype, str(self.model.adapter.device))
        rival.first_token_s([3] * 64)
        return rival

    def runs(self, case: PromptCase) -> list[tuple[Way, int]]:
        """All that is timed of a case, in this order; those of round 0 are not counted."""
        whole = sum(case.sizes(self.model))
        few = [way for way in self.ways if way in WHOLE and whole > DEAR_TOKENS]
        rounds = range(self.repeats + 1)
        return [(way, number) for number in rounds for way in self.ways if way not in few or number == 1]

    def counted(self, case: PromptCase) -> list[str]:
        """The keys of its runs in a journal."""
        return [key_of(case, way, number) for way, number in self.runs(case) if number]

    def measure(self, case: PromptCase, journal: Journal, on_progress: OnProgress = lambda name, way: None) -> None:
        """Time what the journal does not hold yet; each run is written when it is over.

        Args:
            case: Its modules are encoded before the clock starts.
            journal: Gets a record of each run.
            on_progress: Told of every run that is over, or was before.
        """
        left = {way for way, number in self.runs(case) if number and key_of(case, way, number) not in journal}
        with ExitStack() as stack:
            timers = _Timers(self, case, stack) if left else None
            for way, number in self.runs(case):
                key = key_of(case, way, number)
                if way in left and key not in journal:
                    assert timers is not None
                    time.sleep(REST_S)
                    record = timers.run(way)
                    if number:
                        journal.add(key, {"case": case.name, "length": case.length, "way": way, **record})
                on_progress(case.name, way)


class _Timers:
    """A case made ready.

    Args:
        bench: See there.
        case: Its modules are encoded now.
        stack: Closes it.
    """

    def __init__(self, bench: ModuleBench, case: PromptCase, stack: ExitStack) -> None:
        self._bench = bench
        self._timer = stack.enter_context(PromptTimer(bench.model, case.schema, case.prompt))
        self._cached, _ = case.sizes(bench.model)
        header = self._timer.engine.model.encode(self._timer.engine.chat.header(None))
        self._prompt = [*self._timer.tokens, *header]

    def run(self, way: Way) -> Record:
        """One run: its time, the tokens that it encodes, and those that it finds encoded."""
        if way == "host copy":
            return {"seconds": self._timer.copied(), "encoded": 0, "reused": self._cached}
        if way == "HF generate":
            return {"seconds": self._bench.rival.first_token_s(self._prompt), "encoded": len(self._prompt), "reused": 0}
        found = self._timer.first_token(way)
        return {"seconds": found.seconds, "encoded": found.encoded, "reused": found.reused}
