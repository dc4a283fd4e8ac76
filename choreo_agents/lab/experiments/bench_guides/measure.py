"""Answers led by random schemas, in batches: how many validate, and what the masks of a step cost beside it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
import torch

from choreo_agents.engine import Engine
from choreo_agents.errors import GuideError, InvalidRequestError
from choreo_agents.lab.experiments.bench_guides.schemas import Schema, longest
from choreo_agents.lab.experiments.bench_guides.wide_tokens import WideTokenizer
from choreo_agents.models import FramedText
from choreo_agents.models.guides import Grammars
from choreo_agents.sampling import Grammar, Sampling
from choreo_agents.sampling.guiding.masks import fill, words_of
from choreo_agents.tracing import StepRan

T = TypeVar("T")
_ASKED = "Say what you know of Ann, in JSON."
_ENDLESS: Schema = {"type": "string", "minLength": 1000}
_TIMED = 32
"""Tokens of answers whose steps are timed."""


@dataclass
class GuideCounts:
    """What came of all answers."""

    valid: int = 0
    invalid: int = 0
    cut: int = 0
    """At `max_tokens`, told by an error."""
    bounded: int = 0
    """Schemas whose longest output fits `max_tokens`."""
    bounded_cut: int = 0
    """Of these, answers that were cut."""


@dataclass
class MaskTimes:
    """Of masks that are filled together, one entry for each step."""

    vocabulary: int
    per_row_s: list[float] = field(default_factory=list)

    def at(self, share: float) -> float:
        """Seconds for a token and row, at this share of all steps."""
        return float(np.quantile(self.per_row_s, share))


@dataclass
class GuidesReport:
    """Everything measured in one run."""

    model: str
    rows: int
    max_tokens: int
    threads: int
    schemas: int
    counts: GuideCounts
    masks: list[MaskTimes]
    free_step_s: float
    """The median step of so many rows that nothing leads."""
    guided_step_s: float
    """The same, of as many rows that schemas lead."""

    def versions(self) -> dict[str, str]:
        """Of what was measured with."""
        return {"torch": torch.__version__, "llguidance": version("llguidance")}


def measure_guides(
    engine: Engine,
    steps: list[StepRan],
    schemas: Sequence[Schema],
    *,
    rows: int,
    max_tokens: int,
    words: int,
    on_progress: Callable[[str], None] = lambda what: None,
) -> GuidesReport:
    """Decode one answer for each schema, at temperature 1.

    Args:
        engine: Decodes.
        steps: Where it notes them: its sink.
        schemas: Of the answers.
        rows: Answers side by side.
        max_tokens: Of each.
        words: Of the larger vocabulary over which masks are measured as well.
        on_progress: Told of each batch.

    Raises:
        InvalidRequestError: jsonschema or llguidance is not installed.
    """
    counts, said = GuideCounts(), list[tuple[Schema, str]]()
    timed: dict[str, list[StepRan]] = {"free": [], "guided": []}
    for number, batch in enumerate(_batches(schemas, rows)):
        for what, taken in timed.items():
            # None ends before the others: all steps are of all rows.
            guide = None if what == "free" else {"json_schema": _ENDLESS}
            plain = Sampling(temperature=1.0, max_tokens=_TIMED, stop_tokens=(), guide=guide)
            _decode(engine, [plain.model_copy(update={"seed": seed}) for seed in range(rows)])
            taken += [step for step in steps if step.decode_rows == step.tokens == rows]
            steps.clear()
        on_progress("answers")
        asked = [
            Sampling(temperature=1.0, max_tokens=max_tokens, seed=number * rows + place, guide={"json_schema": schema})
            for place, schema in enumerate(batch)
        ]
        answers = _decode(engine, asked)
        for schema, answer in zip(batch, answers, strict=True):
            _count(counts, schema, answer, max_tokens)
            said.append((schema, answer if isinstance(answer, str) else answer.said))
    wide = WideTokenizer(words)
    masks = []
    for name, grammars, vocabulary, encode in (
        ("masks", engine.model.grammars, engine.model.adapter.vocabulary_size, engine.model.encode),
        ("masks, wide", Grammars(wide, words, [wide.end]), words, wide.encode),
    ):
        on_progress(name)
        times = MaskTimes(vocabulary)
        for part in _batches(said, rows):
            _walk(grammars, [(schema, encode(text)) for schema, text in part], times)
        masks.append(times)
    return GuidesReport(
        engine.model.name,
        rows,
        max_tokens,
        torch.get_num_threads(),
        len(schemas),
        counts,
        masks,
        *(float(np.median([step.duration_s for step in taken])) for taken in timed.values()),
    )


def _decode(engine: Engine, asked: Sequence[Sampling]) -> list[str | GuideError]:
    """What was said, or why it has no end."""
    return asyncio.run(_all(engine, asked))


async def _all(engine: Engine, asked: Sequence[Sampling]) -> list[str | GuideError]:
    chat = engine.chat
    opening = engine.model.encode(FramedText.frame(chat.start("system")) + chat.turn("user", _ASKED))
    root = await engine.aprefill(opening)
    header = engine.model.encode(chat.header(None))

    async def one(sampling: Sampling) -> str | GuideError:
        try:
            handle = await engine.adecode(header, [root], sampling=sampling)
        except GuideError as error:
            return error
        text = engine.model.decode(engine.tokens(handle)[len(header) :], special=False)
        engine.release(handle)
        return text

    return await asyncio.gather(*map(one, asked))


def _count(counts: GuideCounts, schema: Schema, answer: str | GuideError, max_tokens: int) -> None:
    bound = longest(schema)
    fits = bound is not None and bound <= max_tokens
    counts.bounded += fits
    if isinstance(answer, GuideError):
        counts.cut += 1
        counts.bounded_cut += fits
    elif is_valid(answer, schema):
        counts.valid += 1
    else:
        counts.invalid += 1


def is_valid(text: str, schema: Schema) -> bool:
    """Whether a text is JSON that validates, formats included.

    Raises:
        InvalidRequestError: jsonschema is not installed.
    """
    try:
        import jsonschema  # noqa: PLC0415 - for development only
    except ImportError as error:
        raise InvalidRequestError("answers are validated by jsonschema: pip install 'choreo-agents[test]'") from error
    try:
        found = json.loads(text)
    except ValueError:
        return False
    kind = jsonschema.Draft202012Validator
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(found))


def _walk(grammars: Grammars, answers: Sequence[tuple[Schema, list[int]]], times: MaskTimes) -> None:
    """Lead answers along what was said, all in step, and time their masks."""
    led: list[tuple[Any, list[int]]] = []
    for schema, tokens in answers:
        guide = grammars.guide(Grammar.model_validate({"json_schema": schema}), frozenset())
        led.append((guide, tokens))
    place = 0
    while True:
        led = [(guide, tokens) for guide, tokens in led if place < len(tokens) and not guide.done]
        if not led:
            return
        guides = [guide for guide, _ in led]
        bits = np.zeros((len(guides), words_of(times.vocabulary)), dtype=np.int32)
        started = time.perf_counter()
        fill(guides, bits)
        times.per_row_s.append((time.perf_counter() - started) / len(guides))
        for guide, tokens in led:
            guide.take(tokens[place])
        place += 1


def _batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
