"""Trains what is missing, plays what was not played yet, and keeps every problem's score."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from choreo_agents.engine import Engine, Memory
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.placing import SynthesisLayout
from choreo_agents.training.ending import CARD_FILE
from choreo_agents.training.journal import Journal
from choreo_agents.training.synthesizer import train_synthesizer
from choreo_agents.training.tuning import Passage
from choreo_bench.evaluation.calibration import TEMPERATURES, tempered
from choreo_bench.evaluation.synthesis import evaluate_synthesis
from choreo_bench.experiments.eval_synthesis.contenders import Contender, ContenderTraining, courses
from choreo_bench.language import Split
from choreo_bench.language.synthesis import SynthesisTask
from choreo_bench.synthesizers.curriculum import drawn_digest

KV_BUDGET_BYTES = 1 << 30
CALIBRATED_ON = 12
"""Development problems of each task, for each temperature."""


@dataclass(frozen=True)
class AskedTask:
    """Problems to be played: a task as it is played, under the name that it has in the journal."""

    name: str
    task: SynthesisTask


class Referee:
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

    def __enter__(self) -> Referee:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def prepare(
        self,
        contenders: Collection[Contender],
        on_progress: Callable[[str, Passage], None],
        on_score: Callable[[str, int, Mapping[str, float]], None],
        command: str = "",
    ) -> None:
        """Train what these contenders need, as far as it is not trained to the end.

        Raises:
            TrainingError: A folder holds another training.
        """
        wanted = {contender.training for contender in contenders}
        for name, course in courses(self._seed).items():
            if name in wanted and not self._is_trained(name, course):
                self._train(name, course, on_progress, on_score, command)

    def play(
        self,
        contenders: Sequence[Contender],
        asked: Sequence[AskedTask],
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
        found: dict[tuple[str, str], list[float]] = {}
        for contender in contenders:
            left = []
            trained = self._training_of(contender)
            for one in asked:
                key = f"{contender.name} | {one.name} | {count}"
                if key in self.journal:
                    record = self.journal.records[key]
                    if record.get("training", trained) != trained:
                        raise InvalidRequestError(
                            f"{str(self.journal.path)!r} holds results of another training of {contender.kind!r}: "
                            "name another folder"
                        )
                    found[contender.name, one.name] = record["scores"]
                    on_progress(contender.name, count)
                else:
                    left.append((key, one))
            if not left:
                continue
            calibrating = list(tasks_of_calibration) or [one.task for one in asked]
            with self._engine(contender, calibrating) as engine:
                for key, one in left:
                    records = self._ask(engine, contender.layout, one, count, on_progress, contender.name)
                    scores = [float(record.solved) for record in records]
                    shares = [record.score for record in records]
                    self.journal.add(key, {"scores": scores, "shares": shares, "training": trained})
                    found[contender.name, one.name] = scores
        return found

    def best_layout(self, contenders: Sequence[Contender]) -> SynthesisLayout | None:
        """That of the contender whose training solved most development problems; None if a card does not say it."""
        scores: dict[SynthesisLayout, float] = {}
        for contender in contenders:
            try:
                card = json.loads((self._trained(contender.training) / CARD_FILE).read_text())
                scores[contender.layout] = float(card["best"])
            except (OSError, ValueError, LookupError, TypeError):
                return None
        return max(scores, key=lambda layout: scores[layout], default=None)

    def _ask(
        self,
        engine: Engine,
        layout: SynthesisLayout,
        asked: AskedTask,
        count: int,
        on_progress: Callable[[str, int], None],
        name: str,
    ) -> Any:
        adapter = engine.adapters[0] if engine.adapters else None
        layout = layout if engine.method == "choreo" else "sequential"
        return evaluate_synthesis(
            engine, [asked.task], count=count, split=self._split, layout=layout, adapter=adapter,
            seed=self._seed, on_progress=lambda _: on_progress(name, 1),
        )  # fmt: skip

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
        """Whether the folder holds what this training ends with, be its checkpoints there or not."""
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

    def _train(
        self,
        training: str,
        course: ContenderTraining,
        on_progress: Callable[[str, Passage], None],
        on_score: Callable[[str, int, Mapping[str, float]], None],
        command: str,
    ) -> None:
        out = self._trained(training)
        train_synthesizer(
            self.model,
            course.settings,
            course.curriculum,
            run=out.parent,
            out=out,
            on_progress=lambda passage: on_progress(training, passage),
            on_score=lambda epoch, shares: on_score(training, epoch, shares),
            command=command,
        )

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
