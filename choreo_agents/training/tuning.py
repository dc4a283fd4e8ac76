"""Trains an adapter and a cache mapper on traces: forced tokens, the engine's views, gradients through every call.

The loss is the log-loss of sampled tokens under the views that the engine would use (Prompt Choreography, section 3.2);
for an example with a teacher's trace, also the divergence from its distributions. The random numbers of a step depend
on (seed, epoch, batch): a killed run resumes from its last checkpoint and ends with the same weights on a CPU.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from choreo_agents.errors import TrainingError
from choreo_agents.models.files import write_text
from choreo_agents.training.checkpoints import UNREADABLE, write_checkpoint
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.trace import Trace, batched
from choreo_agents.training.tuned import Tuned

CHECKPOINT_EVERY_S = 30.0


@dataclass(frozen=True)
class Example:
    """A trace to learn from, and optionally a teacher's with the same learnt tokens, in views that the model knows."""

    trace: Trace
    teacher: Trace | None = None


class Source(Protocol):
    """A source of training examples."""

    @property
    def digest(self) -> str:
        """Digest of the data: a run does not resume on other data."""
        ...

    def epoch(self, number: int) -> Sequence[Example]:
        """Return the examples of an epoch: always the same for a number."""
        ...


@dataclass(frozen=True)
class EvalScore:
    """Score of the weights on the held-out split; higher is better."""

    score: float
    loss: float | None = None
    """In nats per learnt token."""

    @property
    def rank(self) -> tuple[float, float]:
        return self.score, -math.inf if self.loss is None else -self.loss


Judge = Callable[[int], EvalScore]
"""Scores the current weights on the held-out split; called with the number of finished epochs."""


@dataclass
class TrainingProgress:
    """Progress of a training run, over all its processes, and at its end the result; part of each checkpoint."""

    epochs: int
    """Most epochs."""
    epoch: int = 0
    """Number of epochs that were trained and scored."""
    batch: int = 0
    """Number of batches of the next epoch that were trained."""
    batches: int = 0
    """Batches of that epoch; 0 between two epochs."""
    loss_sum: float = 0.0
    """Sum over the learnt tokens of the epoch so far, in nats."""
    learnt_tokens: int = 0
    """Their number."""
    steps: int = 0
    tokens: int = 0
    """Tokens encoded, without teachers'."""
    seconds: float = 0.0
    best_epoch: int = 0
    """Epoch of the best weights; 0: those before training."""
    command: str = ""
    """Command line that began the run, and repeats it."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Training loss, held-out score and held-out loss of each epoch, the first of them before training."""

    @property
    def loss(self) -> float:
        """Mean over the epoch so far, in nats per learnt token."""
        return self.loss_sum / self.learnt_tokens if self.learnt_tokens else math.nan

    @property
    def score(self) -> float:
        """The last held-out score."""
        return float(self.history[-1]["held_out_score"])

    @property
    def untrained(self) -> EvalScore:
        """Score before training."""
        return self.score_of(0)

    @property
    def best(self) -> EvalScore:
        """Score of the best weights."""
        return self.score_of(self.best_epoch)

    def score_of(self, epoch: int) -> EvalScore:
        """Return the held-out score after an epoch."""
        return EvalScore(self.history[epoch]["held_out_score"], self.history[epoch]["held_out_loss"])


class Tuning:
    """A training run that can be resumed.

    Args:
        tuned: The parameters; after the run they have the best weights.
        source: Source of the examples.
        judge: Called before the first epoch and after each.
        checkpoint: File to resume from, if it exists, and to write.
        judged_by: Digest of the held-out data: a run does not resume with another one.
    """

    def __init__(self, tuned: Tuned, source: Source, judge: Judge, checkpoint: Path, judged_by: str = "") -> None:
        self.tuned, self.settings, self.source = tuned, tuned.settings, source
        self._judge, self._judged_by, self._checkpoint = judge, judged_by, checkpoint
        self._forward = tuned.forward(checkpointed=self.settings.checkpointed)
        self._teacher = TraceForward(tuned.model)
        groups: dict[float, list[Tensor]] = {}
        for name, parameter in tuned.named_parameters():
            rate = self.settings.mapper_learning_rate if name.startswith("mapper.") else self.settings.learning_rate
            groups.setdefault(rate, []).append(parameter)
        self._parameters = [parameter for _, parameter in tuned.named_parameters()]
        rated = [{"params": parameters, "highest": rate} for rate, parameters in groups.items()]
        self._optimizer = torch.optim.AdamW(rated, weight_decay=self.settings.weight_decay)
        self.outcome = TrainingProgress(self.settings.epochs)
        self.ended = False
        """Whether the parameters have their final, best weights, also after a loss that is not finite."""
        self._best_state: dict[str, Tensor] | None = None

    def run(
        self, on_progress: Callable[[TrainingProgress], None], *, checkpoint_every_s: float = CHECKPOINT_EVERY_S
    ) -> TrainingProgress:
        """Train to the end, from the checkpoint if there is one.

        Args:
            on_progress: Called after every batch and every score.
            checkpoint_every_s: Seconds between two checkpoints within an epoch.

        Raises:
            TrainingError: The loss is not finite any more: the message names the trace, and the best weights so far
                are kept. Or there are no examples, or the checkpoint is damaged or another run's.
        """
        if self._checkpoint.exists():
            self._load(self._checkpoint)
        progress, written = self.outcome, time.perf_counter()
        began = written - progress.seconds
        if not progress.history:
            self._score()
        while progress.epoch < progress.epochs and progress.epoch - progress.best_epoch < self.settings.patience:
            batches = self._batches(progress.epoch)
            progress.batches = len(batches)
            if not progress.batch:
                progress.loss_sum, progress.learnt_tokens = 0.0, 0
            while progress.batch < len(batches):
                self._step(batches[progress.batch])
                progress.batch += 1
                progress.seconds = time.perf_counter() - began
                on_progress(replace(progress, history=[*progress.history]))
                if time.perf_counter() - written >= checkpoint_every_s:
                    self._save()
                    written = time.perf_counter()
            progress.epoch, progress.batch, progress.batches = progress.epoch + 1, 0, 0
            self._score()
            progress.seconds = time.perf_counter() - began
            self._save()
            written = time.perf_counter()
            on_progress(replace(progress, history=[*progress.history]))
        self._take_best()
        return progress

    def _batches(self, epoch: int) -> list[list[Example]]:
        """Return an epoch's batches: traces of similar lengths in each, the batches in random order."""
        examples = list(self.source.epoch(epoch))
        rng = random.Random(f"order {self.settings.seed} {epoch}")
        rng.shuffle(examples)
        by_trace = {id(example.trace): example for example in examples}
        ordered = sorted((example.trace for example in examples), key=lambda trace: trace.tokens)
        batches = batched(ordered, self.settings.batch_tokens)
        if not batches:
            raise TrainingError(f"epoch {epoch + 1} has no example to learn from: pass more of them")
        rng.shuffle(batches)
        return [[by_trace[id(trace)] for trace in batch] for batch in batches]

    def _step(self, batch: Sequence[Example]) -> None:
        settings, progress = self.settings, self.outcome
        self._set_rates((progress.epoch + progress.batch / progress.batches) / settings.epochs)
        with torch.random.fork_rng():
            place = f"{progress.epoch} {progress.batch}"
            torch.manual_seed(random.Random(f"dropout {settings.seed} {place}").getrandbits(62))
            losses = self._losses(batch)
            if not bool(losses.isfinite().all()):
                self._stop(batch, losses)
            learnt = sum(example.trace.learnt_tokens for example in batch)
            torch.autograd.backward(losses.sum() / learnt)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, settings.clip_norm)
        if not bool(norm.isfinite()):
            self._stop(batch, losses)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        progress.loss_sum += float(losses.detach().sum())
        progress.learnt_tokens += learnt
        progress.steps += 1
        progress.tokens += sum(example.trace.tokens for example in batch)

    def _losses(self, batch: Sequence[Example]) -> Tensor:
        """Return [traces], the sum of the learnt tokens' losses of each trace."""
        learnt = self._forward.logits([example.trace for example in batch])
        wide = learnt.logits.float()
        losses = functional.cross_entropy(wide, learnt.targets, reduction="none")
        share = self.settings.imitation
        taught = [number for number, example in enumerate(batch) if example.teacher is not None]
        if share and taught:
            with torch.no_grad():
                teacher = self._teacher.logits([example.teacher for example in batch if example.teacher is not None])
            rows = torch.isin(learnt.owners, torch.tensor(taught, device=losses.device)).nonzero().flatten()
            assert torch.equal(teacher.targets, learnt.targets[rows]), "a teacher's trace learns other tokens"
            expected, actual = teacher.logits.float().log_softmax(-1), wide[rows].log_softmax(-1)
            divergence = functional.kl_div(actual, expected, log_target=True, reduction="none").sum(-1)
            losses = losses.index_copy(0, rows, (1 - share) * losses[rows] + share * divergence)
        return losses.new_zeros(len(batch)).index_add(0, learnt.owners, losses)

    def _score(self) -> None:
        """Score the weights, and keep them if they are the best so far or the settings keep the last."""
        progress = self.outcome
        with torch.no_grad():
            result = self._judge(progress.epoch)
        if progress.epoch == 0 or result.rank > progress.best.rank or self.settings.keep == "last":
            progress.best_epoch, self._best_state = progress.epoch, self.tuned.state()
        loss = progress.loss if progress.epoch else None
        scored = {"epoch": progress.epoch, "loss": loss, "held_out_score": result.score, "held_out_loss": result.loss}
        progress.history.append(scored)

    def _stop(self, batch: Sequence[Example], losses: Tensor) -> None:
        """Restore the best weights and raise `TrainingError` with the trace whose loss is not finite."""
        wrong = [example.trace.id for example, loss in zip(batch, losses, strict=True) if not bool(loss.isfinite())]
        self._optimizer.zero_grad(set_to_none=True)
        self._take_best()
        every = ", ".join(repr(example.trace.id) for example in batch)
        where = f"trace {wrong[0]!r}" if wrong else f"the gradient of {every}"
        raise TrainingError(
            f"the loss is not finite at {where} (epoch {self.outcome.epoch + 1}): the weights of epoch "
            f"{self.outcome.best_epoch} are kept. Lower the learning rate, or leave the trace out"
        )

    def _take_best(self) -> None:
        if self._best_state is not None:
            self.tuned.load_state(self._best_state)
            self.ended = True

    def _set_rates(self, progress: float) -> None:
        """Set the learning rates: a linear warm-up, then a cosine down to the final rate; `progress` is from 0 to 1."""
        warmup, final = self.settings.warmup, self.settings.final_rate
        rising = min(1.0, (progress + 1e-3) / warmup) if warmup else 1.0
        share = rising * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in self._optimizer.param_groups:
            group["lr"] = group["highest"] * share

    def _identity(self) -> dict[str, Any]:
        """Return settings and digests that a checkpoint must share with this run."""
        return {
            "settings": self.settings.model_dump(mode="json"),
            "data": self.source.digest,
            "held-out data": self._judged_by,
            "weights": self.tuned.model.adapter.weights,
        }

    def _save(self) -> None:
        state = {
            "identity": self._identity(),
            "progress": asdict(self.outcome),
            "parameters": self.tuned.state(),
            "best": self._best_state,
            "optimizer": self._optimizer.state_dict(),
        }
        write_checkpoint(self._checkpoint, state)

    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.tuned.model.adapter.device, weights_only=True)
            differs = [name for name, value in self._identity().items() if state["identity"].get(name) != value]
            if differs:
                raise TrainingError(
                    f"{str(path)!r} was written by a run with other {' and '.join(differs)}: continue with the same "
                    "settings, or pass another folder"
                )
            self.outcome = TrainingProgress(**state["progress"])
            self.tuned.load_state(state["parameters"])
            self._best_state = state["best"]
            self._optimizer.load_state_dict(state["optimizer"])
        except UNREADABLE as error:
            raise TrainingError(f"checkpoint {str(path)!r} cannot be read: remove it to continue without it") from error


CARD_FILE = "card.json"
Card = dict[str, Any]


def run_and_keep(
    tuning: Tuning,
    out: Path,
    on_progress: Callable[[TrainingProgress], None],
    describe: Callable[[TrainingProgress], Mapping[str, Any]],
    *,
    command: str = "",
) -> Card:
    """Train to the end and write the best weights with a card; without one if the loss ends as not finite.

    Args:
        tuning: The run.
        out: Directory for weights and card.
        on_progress: As for `Tuning.run`.
        describe: Returns further entries of the card.
        command: Command line that repeats the run; of a resumed run the card has the first one.

    Raises:
        TrainingError: As for `Tuning.run`.
        OSError: The weights cannot be written; old files are kept.
    """
    path = out / CARD_FILE
    tuning.outcome.command = command
    try:
        outcome = tuning.run(on_progress)
    except BaseException:
        if tuning.ended:
            path.unlink(missing_ok=True)  # it describes other weights
            tuning.tuned.save(out)
        raise
    tuned = tuning.tuned
    entries = {
        "command": outcome.command,
        **describe(outcome),
        "model": tuned.model.name,
        "weights": tuned.model.adapter.weights,
        "settings": tuned.settings.model_dump(mode="json"),
        "data_sha256": tuning.source.digest,
        "parameters": tuned.parameters,
        "share_of_model": tuned.parameters / tuned.model.adapter.parameters,
        "best_epoch": outcome.best_epoch,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "history": outcome.history,
        "minutes": round(outcome.seconds / 60, 2),
        "torch": torch.__version__,
        "device": tuned.model.adapter.device.type,
    }
    text = json.dumps(entries, indent=2) + "\n"
    path.unlink(missing_ok=True)
    tuned.save(out)
    write_text(path, text)
    card: Card = json.loads(text)
    return card
