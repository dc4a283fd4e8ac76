"""Lets contenders answer about branches: trains what is missing, plays what was not played yet, keeps every score.

Contenders answer from words, from caches as they are, and with what was trained for them. Sweeps are over what
Parallel-Synthesis leaves open: the number of branches, their length, and their order.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal, Self

import torch

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.engine import Engine, Memory
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.synthesis.placing import SynthesisLayout
from choreo_agents.training.journal import Journal
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.synthesizer import train_synthesizer
from choreo_agents.training.tuning import CARD_FILE
from choreo_bench.evaluation.synthesis import evaluate_synthesis
from choreo_bench.harness import Display
from choreo_bench.language import Problem, Split
from choreo_bench.language.synthesis import SYNTHESIS_TASKS, Synthesis, SynthesisTask
from choreo_bench.synthesizers.curriculum import DrawnCurriculum, drawn_digest

Kind = Literal["text", "untrained", "calibrated", "full", "no mapper", "no adapter", "native"]
KV_BUDGET_BYTES = 1 << 30
TEMPERATURES = (0.7, 0.8, 0.9, 1.1, 1.25)
"""That are tried; 1 changes nothing."""
CALIBRATED_ON = 12
"""Development problems of each task, for each temperature."""


@dataclass(frozen=True)
class Contender:
    """A column of a table: one way of answering."""

    kind: Kind
    layout: SynthesisLayout = "sequential"

    @property
    def training(self) -> str:
        """Name of the training that it needs, which is also the training's directory; empty if it needs none."""
        if self.kind in ("text", "untrained", "calibrated"):
            return ""
        return self.kind if self.kind == "native" else f"{self.kind.replace(' ', '-')}-{self.layout}"

    @property
    def name(self) -> str:
        return self.kind if self.kind in ("text", "native") else f"{self.kind}, {self.layout}"


CONTENDERS: tuple[Contender, ...] = (
    Contender("text"),
    Contender("untrained", "parallel"),
    Contender("untrained", "sequential"),
    Contender("calibrated", "parallel"),
    Contender("calibrated", "sequential"),
    Contender("full", "parallel"),
    Contender("full", "sequential"),
    Contender("no mapper", "parallel"),
    Contender("no mapper", "sequential"),
    Contender("no adapter", "parallel"),
    Contender("no adapter", "sequential"),
    Contender("native", "native"),
)
FULL = TuneSettings(
    rank=32, mapper_rank=None, boundaries=True, dropout=0.0, learning_rate=3e-3, mapper_learning_rate=4e-3,
    final_rate=0.0, epochs=20, batch_tokens=4096, patience=20, keep="last", imitation=0.5,
)  # fmt: skip
"""As `choreo train synthesizer` has them, but longer, and never stopped early: at the end, where the rates come to
nothing, the weights are better than a score of few problems can tell."""


@dataclass(frozen=True)
class ContenderTraining:
    """Training of a contender."""

    settings: TuneSettings
    curriculum: DrawnCurriculum


_LEFT_OUT: Mapping[Kind, Mapping[str, int]] = {
    "full": {},
    "no mapper": {"mapper_rank": 0},
    "no adapter": {"rank": 0},
    "native": {},
}


def courses(seed: int = 0) -> Mapping[str, ContenderTraining]:
    """The trainings, by name: one for each layout, all equally long."""
    full = FULL.model_copy(update={"seed": seed})
    return {
        one.training: ContenderTraining(
            full.model_copy(update=_LEFT_OUT[one.kind]),
            DrawnCurriculum(layouts=(one.layout,), examples=2048, judged=12, seed=seed),
        )
        for one in CONTENDERS
        if one.training
    }


def contenders_named(names: str | None) -> list[Contender]:
    """Find contenders by kind, all layouts of it, or as `kind:layout`, with commas between; None: all.

    Raises:
        InvalidRequestError: There is none of that name.
    """
    if names is None:
        return list(CONTENDERS)
    wanted = {name.strip() for name in names.split(",")}
    known = {contender.kind for contender in CONTENDERS} | {f"{one.kind}:{one.layout}" for one in CONTENDERS}
    unknown = sorted(wanted - known)
    if unknown:
        kinds = ", ".join(sorted({contender.kind for contender in CONTENDERS}))
        raise InvalidRequestError(
            f"unknown contender {unknown[0]!r}: use some of {kinds}, each also with one layout, such as full:parallel"
        )
    return [one for one in CONTENDERS if wanted & {one.kind, f"{one.kind}:{one.layout}"}]


@dataclass(frozen=True)
class AskedTask:
    """Problems to be played: a task as it is played, under the name that it has in the journal."""

    name: str
    task: SynthesisTask


BRANCHES = (2, 4, 8, 16)
LENGTHS = (1, 2, 4, 8)
ORDERS = 3
"""Random orders of the same branches."""
SWEPT = (Contender("text"), Contender("full", "parallel"), Contender("full", "sequential"))
"""Who answers in them."""


@dataclass(frozen=True)
class Shuffled:
    """A task whose branches come in another order: the same problems, differently told."""

    task: SynthesisTask
    order: int

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def branches(self) -> int:
        return self.task.branches

    @property
    def most_branches(self) -> int:
        return self.task.most_branches

    def draw(self, rng: random.Random) -> Problem:
        problem = self.task.draw(rng)
        order = list(problem.branches)
        texts = sorted(message.text for message in problem.messages)
        random.Random(f"order {self.order} {texts}").shuffle(order)
        place = dict(zip(problem.branches, order, strict=True))
        # Whoever saw the branches sees them in the new order; nothing else changes.
        seen = [
            replace(message, parents=tuple(place.get(parent, parent) for parent in message.parents))
            if set(problem.branches) <= set(message.parents)
            else message
            for message in problem.messages
        ]
        return replace(problem, messages=tuple(seen), branches=tuple(order))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, task=self.task.varied(rng, hardness))

    def with_branches(self, branches: int) -> Self:
        return replace(self, task=self.task.with_branches(branches))


def by_branches() -> dict[int, list[AskedTask]]:
    """Every task with so many branches, as far as it has words for them."""
    return {
        count: [
            AskedTask(f"{name} of {count}", task.with_branches(count))
            for name, task in SYNTHESIS_TASKS.items()
            if count <= task.most_branches
        ]
        for count in BRANCHES
    }


def by_length() -> dict[int, list[AskedTask]]:
    """Tasks whose branches may be longer, with four of them."""
    tasks = [task for task in SYNTHESIS_TASKS.values() if isinstance(task, Synthesis) and task.lengths[1] > 1]
    return {
        length: [
            AskedTask(f"{task.name} of length {length}", replace(task, branches=4, length=length)) for task in tasks
        ]
        for length in LENGTHS
    }


def by_order() -> dict[int, list[AskedTask]]:
    """Every task, its branches in their own order and in random ones."""
    usual = {0: [AskedTask(name, task) for name, task in SYNTHESIS_TASKS.items()]}
    return usual | {
        order: [AskedTask(f"{name} in order {order}", Shuffled(task, order)) for name, task in SYNTHESIS_TASKS.items()]
        for order in range(1, ORDERS + 1)
    }


def sweeps() -> dict[str, dict[int, list[AskedTask]]]:
    """Make all sweeps, by their titles."""
    return {"branches": by_branches(), "length": by_length(), "order": by_order()}


def changed(one: Sequence[Iterable[float]]) -> float:
    """The share of problems whose verdict is not the same in all orders."""
    verdicts = list(zip(*one, strict=True))
    return sum(len(set(orders)) > 1 for orders in verdicts) / len(verdicts)


def tempered(geometry: KVGeometry, kinds: Sequence[AttentionKind], temperature: float) -> CacheMapper:
    """A mapper that divides the scores of branch tokens by a temperature, by scaling their keys.

    It is the attention temperature of adaptive parallel encoding, without that method's further factor on the sums.
    """
    width = geometry.kv_heads * geometry.head_dim
    mapper = CacheMapper(geometry, kinds, width)
    state = {name: torch.zeros_like(tensor) for name, tensor in mapper.state_dict().items()}
    state["key_down"] += torch.eye(width, dtype=torch.float32)
    state["key_up"] += torch.eye(width, dtype=torch.float32) * (1 / temperature - 1)
    mapper.load_state_dict(state)
    return mapper


def _played(on_progress: Callable[[str, int], None], name: str, _task: str) -> None:
    on_progress(name, 1)


class Evaluator:
    """Lets contenders answer; what is known is not asked again.

    Args:
        model: Speaks the embedded language.
        folder: Of adapters and the journal.
        seed: Of the first problem, and of trainings.
        split: Of the problems.
    """

    def __init__(self, model: LoadedModel, folder: Path, *, seed: int = 0, split: Split = "test") -> None:
        self.model = model
        self._folder = folder
        self._seed = seed
        self._split: Split = split
        settings = {"weights": model.adapter.fingerprint, "seed": seed, "split": split}
        self.journal = Journal(folder / "played.jsonl", settings)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def prepare(
        self,
        contenders: Collection[Contender],
        display: Display,
        command: str = "",
    ) -> None:
        """Train what these contenders need, as far as it is not trained to the end.

        Raises:
            TrainingError: A folder holds another training.
        """
        wanted = {contender.training for contender in contenders}
        for name, course in courses(self._seed).items():
            if name in wanted and not self._is_trained(name, course):
                display.named(name)
                train_synthesizer(
                    self.model,
                    course.settings,
                    course.curriculum,
                    run=self._trained(name).parent,
                    out=self._trained(name),
                    on_progress=display.training,
                    on_score=display.scored,
                    command=command,
                )

    def play_all(
        self,
        contenders: Sequence[Contender],
        count: int,
        sweepers: Sequence[Contender],
        fewer: int,
        sweeps: Mapping[str, Mapping[int, Sequence[AskedTask]]],
        display: Display,
    ) -> tuple[dict[tuple[str, str], list[float]], dict[tuple[str, str], list[float]]]:
        """Play every task, then every sweep.

        Args:
            contenders: Who answers all tasks, ...
            count: ... so many problems of each.
            sweepers: Who answers what is swept, ...
            fewer: ... so many problems of each.
            sweeps: By their titles.
            display: Shows how far they are.

        Returns:
            The scores of the tasks, and those of the sweeps.
        """
        usual = [AskedTask(name, task) for name, task in SYNTHESIS_TASKS.items()]

        def play(title: str, who: Sequence[Contender], tasks: Sequence[AskedTask], count_each: int) -> Any:
            display.named(title).cleared()
            wanted = len(tasks) * count_each
            calibrating = [one.task for one in usual]
            return self.play(who, tasks, count_each, lambda name, more: display.played(name, more, wanted), calibrating)

        scores = play("tasks", contenders, usual, count)
        swept: dict[tuple[str, str], list[float]] = {}
        for title, by_value in sweeps.items():
            swept |= play(title, sweepers, [one for tasks in by_value.values() for one in tasks], fewer)
        return scores, swept

    def play(
        self,
        contenders: Sequence[Contender],
        tasks: Sequence[AskedTask],
        count: int,
        on_progress: Callable[[str, int], None] = lambda name, done: None,
        tasks_of_calibration: Sequence[SynthesisTask] = (),
    ) -> dict[tuple[str, str], list[float]]:
        """Every contender's scores, problem by problem, by its name and that of what was asked.

        Args:
            contenders: Who answers.
            asked: What.
            count: Problems of each.
            on_progress: Told of every problem.
            tasks_of_calibration: That temperatures are chosen by; none: what is asked.

        Raises:
            InvalidRequestError: The journal holds results of another training.
        """
        scores_by_task: dict[tuple[str, str], list[float]] = {}
        for contender in contenders:
            left = []
            trained = self._training_of(contender)
            for one in tasks:
                key = f"{contender.name} | {one.name} | {count}"
                if key in self.journal:
                    record = self.journal.records[key]
                    if record.get("training", trained) != trained:
                        raise InvalidRequestError(
                            f"{str(self.journal.path)!r} has results of another training of {contender.kind!r}: pass "
                            "another folder"
                        )
                    scores_by_task[contender.name, one.name] = record["scores"]
                    on_progress(contender.name, count)
                else:
                    left.append((key, one))
            if not left:
                continue
            calibrating = list(tasks_of_calibration) or [one.task for one in tasks]
            with self._engine(contender, calibrating) as engine:
                adapter = engine.adapters[0] if engine.adapters else None
                layout = contender.layout if engine.method == "choreo" else "sequential"
                for key, one in left:
                    records = evaluate_synthesis(
                        engine,
                        [one.task],
                        count=count,
                        split=self._split,
                        layout=layout,
                        adapter=adapter,
                        seed=self._seed,
                        on_progress=partial(_played, on_progress, contender.name),
                    )
                    scores = [float(record.solved) for record in records]
                    shares = [record.score for record in records]
                    self.journal.add(key, {"scores": scores, "shares": shares, "training": trained})
                    scores_by_task[contender.name, one.name] = scores
        return scores_by_task

    def best_layout(self, contenders: Sequence[Contender]) -> SynthesisLayout | None:
        """Return the layout of the contender whose training scored best; None if a card lacks the score."""
        scores: dict[SynthesisLayout, float] = {}
        for contender in contenders:
            try:
                card = json.loads((self._trained(contender.training) / CARD_FILE).read_text())
                scores[contender.layout] = float(card["best"])
            except (OSError, ValueError, LookupError, TypeError):
                return None
        return max(scores, key=lambda layout: scores[layout], default=None)

    def _engine(self, contender: Contender, calibrating: Sequence[SynthesisTask]) -> Engine:
        method: Any = "baseline" if contender.kind == "text" else "choreo"
        engine = Engine.load(self.model, method=method, memory=Memory(kv_budget_bytes=KV_BUDGET_BYTES))
        if contender.kind == "calibrated":
            engine.load_adapter(self._calibrated(contender.layout, calibrating))
        elif contender.training:
            engine.load_adapter(self._trained(contender.training))
        return engine

    def _training_of(self, contender: Contender) -> str:
        """Tells the training that a contender answers with from others; empty for those without one."""
        card = self._trained(contender.training) / CARD_FILE
        return hashlib.sha256(card.read_bytes()).hexdigest()[:16] if contender.training and card.exists() else ""

    def _trained(self, training: str) -> Path:
        return self._folder / training / "synthesizer"

    def _is_trained(self, training: str, course: ContenderTraining) -> bool:
        """Return whether the directory holds the result of this training, with checkpoints or without."""
        try:
            card = json.loads((self._trained(training) / CARD_FILE).read_text())
        except (OSError, ValueError):
            return False
        wanted = {
            "settings": course.settings.model_dump(mode="json"),
            "curriculum": course.curriculum.as_object(),
            "weights": self.model.adapter.weights,
            "data_sha256": drawn_digest(course.curriculum, course.settings),
        }
        return isinstance(card, dict) and {key: card.get(key) for key in wanted} == json.loads(json.dumps(wanted))

    def _calibrated(self, layout: SynthesisLayout, tasks: Sequence[SynthesisTask]) -> Path:
        """The mapper of the best temperature on development problems."""
        adapter = self.model.adapter
        best: tuple[float, Path] | None = None
        for temperature in TEMPERATURES:
            folder = self._folder / "calibrated" / f"{temperature:g}"
            tempered(adapter.geometry, adapter.kinds, temperature).save(folder, adapter.weights)
            key = f"calibration {layout} {temperature:g}"
            if key not in self.journal:
                with Engine.load(self.model, memory=Memory(kv_budget_bytes=KV_BUDGET_BYTES)) as engine:
                    name = engine.load_adapter(folder)
                    records = evaluate_synthesis(
                        engine, tasks, count=CALIBRATED_ON, split="dev", layout=layout, adapter=name
                    )
                self.journal.add(key, {"score": mean(record.solved for record in records)})
            score = float(self.journal.records[key]["score"])
            if best is None or score > best[0]:
                best = score, folder
        assert best is not None
        return best[1]
