"""Merges of one's own to train a synthesizer on: a trunk, branches, what is asked and what is right."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from choreo_agents.errors import InvalidRequestError, TrainingError
from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.placing import SynthesisLayout
from choreo_agents.training.synthesis_traces import (
    QUESTIONS,
    ROOT,
    BranchExample,
    Views,
    asked_together,
    boundaries_of,
    cache_trace,
    text_trace,
    turn_message,
)
from choreo_agents.training.synthesizer import Judged
from choreo_agents.training.trace import Trace, TraceMessage
from choreo_agents.training.tuned import TUNED, Tuned
from choreo_agents.training.tuning import EvalScore, Example
from choreo_agents.workflows.cases import read_json_lines


class _Turn(BaseModel):
    model_config = ConfigDict(frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str = Field(min_length=1)
    name: str | None = None


class _Branch(BaseModel):
    model_config = ConfigDict(frozen=True)

    content: str = Field(min_length=1)
    """What the worker said."""
    name: str | None = None
    context: tuple[_Turn, ...] = ()
    """What it alone was told before."""


class Merge(BaseModel):
    """A line of the file of merges; other fields are ignored."""

    model_config = ConfigDict(frozen=True)

    system: str | None = None
    trunk: tuple[_Turn, ...] = ()
    """What all branches have seen."""
    branches: tuple[_Branch, ...] = Field(min_length=1)
    ask: str = ""
    """What the synthesizer is asked; empty: nothing."""
    answer: str = Field(min_length=1)
    name: str | None = None
    """The synthesizer's."""


@dataclass(frozen=True)
class OwnMerges:
    """The user's merges: those to learn from, and those held out."""

    train: tuple[BranchExample, ...]
    """Lines that follow each other and differ in what is asked are one."""
    held_out: tuple[BranchExample, ...]

    @property
    def held_out_digest(self) -> str:
        """Tells what judges from other merges."""
        return hashlib.sha256(repr(self.held_out).encode()).hexdigest()

    def as_object(self, layouts: Sequence[SynthesisLayout]) -> dict[str, Any]:
        """Convert to plain JSON for a card."""
        return {
            "own merges": sum(1 + len(fan.others) for fan in self.train),
            "held_out": len(self.held_out),
            "layouts": list(layouts),
        }

    def held_out_traces(self, layouts: Sequence[SynthesisLayout], tuned: Tuned) -> list[Trace]:
        """Return the held-out traces, in every layout."""
        adapter = TUNED if tuned.lora is not None else None
        views = Views(layouts, tuned.mapper is not None, adapter, tuned.settings.boundaries)
        return [cache_trace(fan, layout, views) for fan in self.held_out for layout in layouts]


def read_merges(
    path: Path, model: LoadedModel, layouts: Sequence[SynthesisLayout], held_out: int, *, taught: bool = False
) -> OwnMerges:
    """Read a JSONL file; its last lines judge, a third of them at most, those with the same branches together.

    Args:
        path: The file.
        model: That is to learn.
        layouts: Where branches will stand.
        held_out: Lines that judge at most, unless more have the same branches in every case.
        taught: Whether each has to fit into one ordinary prompt as well, for the model's own distributions over it.

    Raises:
        InvalidRequestError: A line is no merge, or there are fewer than two.
        TrainingError: A line reaches past the model's context.
    """
    most = model.adapter.max_positions
    fans: list[BranchExample] = []
    for number, merge in read_json_lines(path, TypeAdapter(Merge), "a valid merge"):
        fan = fan_of_merge(model, merge, id=f"line {number}")
        reach = max(cache_trace(fan, layout, Views(boundaries=True)).reach for layout in layouts)
        if reach > most:
            raise TrainingError(
                f"line {number} of {str(path)!r} reaches position {reach}, but the model's context is {most}: leave it "
                "out"
            )
        whole = text_trace(fan).reach
        if taught and whole > most:
            raise TrainingError(
                f"line {number} of {str(path)!r} reaches position {whole} as one ordinary prompt, but the model's "
                f"context is {most}: leave it out, or train without its distributions (--imitation 0)"
            )
        fans.append(fan)
    if len(fans) < 2:
        raise InvalidRequestError(f"{str(path)!r} has {len(fans)} merges: training and evaluation need at least two")
    judging = _judging(fans, max(1, min(held_out, len(fans) // 3)))
    learnt = [fan for place, fan in enumerate(fans) if place not in judging]
    return OwnMerges(_together(learnt), tuple(fans[place] for place in sorted(judging)))


def _judging(fans: Sequence[BranchExample], most: int) -> set[int]:
    """The places of those that judge: all that have the same branches do, or none of them.

    The last ones, as far as they are not too many; the smallest set of branches, if all are. Where all merges have the
    same branches, there is no other way than to cut between them.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, fan in enumerate(fans):
        alike.setdefault(fan.branches, []).append(place)
    if len(alike) == 1:
        return set(range(len(fans) - most, len(fans)))
    positions: set[int] = set()
    for places in reversed(alike.values()):
        if len(positions) + len(places) <= most:
            positions.update(places)
    smallest = min(reversed(alike.values()), key=len)
    return positions or set(smallest)


def _together(fans: Sequence[BranchExample]) -> tuple[BranchExample, ...]:
    """Neighbours with the same branches as one, up to a few: what is asked differs, branches are encoded once."""
    examples: list[BranchExample] = []
    for _, group in groupby(fans, key=lambda fan: (fan.trunk, fan.branches)):
        same = list(group)
        examples += [asked_together(same[at : at + QUESTIONS]) for at in range(0, len(same), QUESTIONS)]
    return tuple(examples)


def fan_of_merge(model: LoadedModel, merge: Merge, *, id: str) -> BranchExample:  # noqa: A002
    """A merge as tokens, in the model's own chat turns."""
    opening = model.chat.root(merge.system)
    root = [TraceMessage(ROOT, tuple(model.encode(opening)), role="system")] if opening else []
    trunk = [_span(model, f"trunk {place}", turn) for place, turn in enumerate(merge.trunk, start=1)]
    branches = []
    for number, branch in enumerate(merge.branches, start=1):
        private = [
            _span(model, f"context {number}.{place}", turn) for place, turn in enumerate(branch.context, start=1)
        ]
        words = turn_message(model, f"branch {number}", "assistant", branch.content, branch.name)
        branches.append((tuple(private), words))
    ask = [turn_message(model, "ask", "user", merge.ask)] if merge.ask else []
    answer = turn_message(model, "answer", "assistant", merge.answer, merge.name, learn=True)
    behind = boundaries_of(model, [words for _, words in branches])
    return BranchExample(id, (*root, *trunk), tuple(branches), (*ask, answer), behind)


@dataclass(frozen=True)
class OwnCurriculum:
    """Curriculum of the user's own merges, judged by the loss of those that are held out, in every layout."""

    merges: OwnMerges
    layouts: tuple[SynthesisLayout, ...]
    """Where branches stand, in equal shares."""
    seed: int = 0
    """Decides which example has which layout."""

    @property
    def judged_by(self) -> str:
        return self.merges.held_out_digest

    def source(self, tuned: Tuned) -> OwnExamples:
        return OwnExamples(self, tuned)

    def judge(self, tuned: Tuned, run: Path) -> Callable[[], Judged]:
        forward = tuned.forward()
        traces = self.merges.held_out_traces(self.layouts, tuned)

        def score() -> Judged:
            loss = forward.mean_loss(traces, tuned.settings.batch_tokens)
            return EvalScore(-loss, loss), {"held-out loss": loss}

        return score

    def as_object(self) -> dict[str, Any]:
        return self.merges.as_object(self.layouts)


class OwnExamples:
    """The same merges in every epoch, each in a layout drawn anew.

    Args:
        curriculum: The merges, their layouts and the seed.
        tuned: For which: mapped branches, adapted answers, and if it imitates, the model's own distributions over the
            words beside them.
    """

    def __init__(self, curriculum: OwnCurriculum, tuned: Tuned) -> None:
        self._fans, self._seed = curriculum.merges.train, curriculum.seed
        adapter = TUNED if tuned.lora is not None else None
        behind, taught = tuned.settings.boundaries, tuned.settings.imitation > 0
        self._views = Views(curriculum.layouts, tuned.mapper is not None, adapter, behind, taught)
        text = repr([self._fans, curriculum.layouts, self._views.mapped, adapter, behind])
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def epoch(self, number: int) -> Sequence[Example]:
        """The examples of an epoch."""
        rng = random.Random(f"own merges {self._seed} {number}")
        return [self._views.example(fan, rng) for fan in self._fans]


def _span(model: LoadedModel, name: str, turn: _Turn) -> TraceMessage:
    return turn_message(model, name, turn.role, turn.content, turn.name)
