"""Trains the embedded model from scratch.

Two ingredients decide whether it learns at all: an induction warm-up before any task, and Muon on the hidden
matrices. Each bucket of batches is drawn from (seed, bucket), so a killed run continues where its last checkpoint
stands, and without compiled kernels ends with the same weights as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from choreo_agents.errors import TrainingError
from choreo_agents.models.loader import usable_device
from choreo_agents.training.checkpoints import UNREADABLE, write_checkpoint
from choreo_bench.embedded.recipe import TrainingRecipe
from choreo_bench.embedded.team import Team, teamed
from choreo_bench.embedded.tokenizer import build_tokenizer
from choreo_bench.embedded.transcripts import IGNORED, Encoded, draw_transcripts, encode, transcripts
from choreo_bench.language import TASKS, draw_problem

CHECKPOINT_EVERY_S = 60.0
SCORED = 32
"""Problems of a task for each intermediate score."""
SCORED_TOKENS = 8192
"""Tokens of a batch that is scored, padding included."""


@dataclass(frozen=True)
class Batch:
    """Rows of token ids and labels, padded at their ends."""

    ids: torch.Tensor
    """[rows, tokens]"""
    labels: torch.Tensor
    """[rows, tokens]; `IGNORED` where nothing is learnt."""


def bucket_batches(recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerFast, bucket: int) -> list[Batch]:
    """The batches of a bucket: rows of like lengths side by side, the batches in random order."""
    batches = as_batches(encode(tokenizer, draw_transcripts(recipe, bucket)), recipe.phase(bucket).batch_tokens)
    random.Random(f"order {recipe.seed} {bucket}").shuffle(batches)
    return batches


def as_batches(rows: Sequence[Encoded], batch_tokens: int) -> list[Batch]:
    """Sort rows by length and cut them into batches of at most so many tokens, padding included.

    A row longer than that is a batch of its own.
    """
    batches: list[Batch] = []
    chunk: list[Encoded] = []
    for row in sorted(rows, key=lambda row: len(row[0])):
        if chunk and len(row[0]) * (len(chunk) + 1) > batch_tokens:
            batches.append(_padded(chunk))
            chunk = []
        chunk.append(row)
    return [*batches, _padded(chunk)] if chunk else batches


def _padded(rows: Sequence[Encoded]) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows])
    return Batch(ids, labels)


@dataclass(frozen=True)
class BucketProgress:
    """Progress of a run."""

    bucket: int
    buckets: int
    tokens: int
    seconds: float
    loss: float
    """Mean over the last bucket, in nats per learnt token."""


@torch.no_grad()
def first_choices(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: TrainingRecipe
) -> dict[str, float]:
    """Return by task the share of development transcripts whose every learnt token is the model's first choice.

    Quick and a little severe: the gold words are forced, and where several are right only one counts.
    """
    model.eval()
    shares: dict[str, float] = {}
    for name in dict.fromkeys(name for phase in recipe.phases for name in phase.mix if name in TASKS):
        problems = [draw_problem(TASKS[name], "dev", seed) for seed in range(SCORED)]
        rows = encode(tokenizer, [transcript for problem in problems for transcript in transcripts(problem)])
        right = 0
        for batch in as_batches(rows, SCORED_TOKENS):
            ids, labels = batch.ids.to(model.device), batch.labels.to(model.device)[:, 1:]
            choices = model(input_ids=ids[:, :-1], use_cache=False).logits.argmax(-1)
            right += int(((choices == labels) | (labels == IGNORED)).all(dim=1).sum())
        shares[name] = right / len(rows)
    return shares


class Pretraining:
    """A training run: its model, optimisers and progress."""

    def __init__(self, recipe: TrainingRecipe, *, device: str = "cpu", compiled: bool = False) -> None:
        """Start from random weights.

        Args:
            recipe: Everything that decides the weights, but the machine.
            device: Where to train.
            compiled: Compile the model's kernels first: faster after a minute, but a resumed run may then differ in
                the last bits from one that was never stopped.
        """
        self.recipe = recipe
        self.device = usable_device(device)
        self.tokenizer = build_tokenizer()
        self.model = build_model(recipe, self.tokenizer).to(self.device)
        self.bucket, self.step, self.tokens, self.seconds = 0, 0, 0, 0.0
        self._body: Callable[..., Any] = self.model.model
        self.compiled = compiled
        """Whether kernels were compiled, in this process or in one before it."""
        if compiled:
            self._body = self._compiled_body()
        named = list(self.model.named_parameters())
        self._parameters = [parameter for _, parameter in named]
        hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        rest = [p for name, p in named if not (p.ndim == 2 and "embed" not in name)]
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (_muon(hidden, recipe.muon_learning_rate), recipe.muon_learning_rate),
            (_adamw(rest, recipe.adamw_learning_rate), recipe.adamw_learning_rate),
        ]

    def run(
        self,
        checkpoint: Path,
        on_bucket: Callable[[BucketProgress], None],
        on_scores: Callable[[int, Mapping[str, float]], None],
        *,
        score_every: int = 50,
        processes: int = 1,
        checkpoint_every_s: float = CHECKPOINT_EVERY_S,
    ) -> None:
        """Train to the end, from the checkpoint if there is one.

        Args:
            checkpoint: Where it is.
            on_bucket: Told of every bucket that is over.
            on_scores: Told the share of development problems that are right after a bucket, by task.
            score_every: Buckets between two scores; the last one is scored, too.
            processes: That share each step, at most as many as its batches; the weights do not depend on it.
            checkpoint_every_s: Seconds between two.

        Raises:
            TrainingError: The checkpoint is damaged, or another recipe's, or a process ended.
        """
        saved = checkpoint if checkpoint.exists() else None
        if saved is not None:
            self._load(saved)
        if self.bucket == self.recipe.buckets:
            return
        started = time.perf_counter() - self.seconds
        written = time.perf_counter()
        helper = partial(_help, self.recipe, saved, self._body is not self.model.model)
        size = sum(parameter.numel() for parameter in self._parameters)
        with teamed(helper, self.recipe.step_batches, size, min(processes, self.recipe.step_batches)) as team:
            while self.bucket < self.recipe.buckets:
                loss = self._train_bucket(team)
                self.bucket += 1
                now = time.perf_counter()
                self.seconds = now - started
                done = self.bucket == self.recipe.buckets
                on_bucket(BucketProgress(self.bucket, self.recipe.buckets, self.tokens, self.seconds, loss))
                if done or now - written >= checkpoint_every_s:
                    write_checkpoint(checkpoint, self._state())
                    written = now
                if done or self.bucket % score_every == 0:
                    on_scores(self.bucket, first_choices(self.model, self.tokenizer, self.recipe))

    def help(self, team: Team, saved: Path | None) -> None:
        """Work on a team's share of the batches until its run ends."""
        if saved is not None:
            self._load(saved)
        while self.bucket < self.recipe.buckets:
            self._train_bucket(team)
            self.bucket += 1

    def _compiled_body(self) -> Callable[..., Any]:
        body: Callable[..., Any] = torch.compile(self.model.model, dynamic=True)
        try:
            body(input_ids=torch.zeros(2, 3, dtype=torch.long, device=self.device), use_cache=False)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TrainingError(f"the kernels cannot be compiled: {reason}. Train with --no-compile") from error
        return body

    def _train_bucket(self, team: Team) -> float:
        """Run the bucket's batches; the mean loss per learnt token, in nats."""
        batches = bucket_batches(self.recipe, self.tokenizer, self.bucket)
        size = self.recipe.step_batches
        steps = [batches[first : first + size] for first in range(0, len(batches), size)]
        losses: list[float] = []
        self.model.train()
        for number, step in enumerate(steps):
            self._set_rates(self.recipe.done(self.bucket + number / len(steps)))
            for index in team.mine:
                if index < len(step):
                    team.put(index, self._parameters, self._backward(step[index]))
            losses.append(team.take(len(step), self._parameters))
            torch.nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip_norm)
            for optimizer, _ in self._optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.tokens += sum(batch.ids.numel() for batch in step)
        return sum(losses) / len(losses)

    def _backward(self, batch: Batch) -> torch.Tensor:
        """Leave a batch's gradient on the parameters; its mean loss."""
        ids, labels = batch.ids.to(self.device), batch.labels.to(self.device)
        states = self._body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        # Only what is learnt goes through the output matrix: most of a prompt is not.
        learnt = labels[:, 1:] != IGNORED
        logits = self.model.lm_head(states[learnt])
        loss = functional.cross_entropy(logits, labels[:, 1:][learnt], reduction="sum")
        # Every learnt token counts alike, whether its batch has many or, of long prompts, few.
        torch.autograd.backward(loss / self.recipe.usual_learnt_tokens)
        return loss.detach() / learnt.sum()

    def _set_rates(self, done: float) -> None:
        """Linear warm-up, then a cosine over the share of the cycle that is done."""
        share = min(1.0, (self.step + 1) / self.recipe.warmup_steps) * self.recipe.phase(self.bucket).rate
        last = self.recipe.last_learning_rate
        share *= last + (1 - last) * 0.5 * (1 + math.cos(math.pi * done))
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * share

    def _state(self) -> dict[str, Any]:
        return {
            "recipe": recipe_json(self.recipe),
            "vocabulary": vocabulary_digest(self.tokenizer),
            "compiled": self.compiled,
            "counts": {"bucket": self.bucket, "step": self.step, "tokens": self.tokens, "seconds": self.seconds},
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
        }

    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            if state["vocabulary"] != vocabulary_digest(self.tokenizer):
                raise TrainingError(
                    f"{str(path)!r} was written for another vocabulary: pass another folder, or remove it"
                )
            if state["recipe"] != recipe_json(self.recipe):
                raise TrainingError(
                    f"{str(path)!r} was written by a run with other settings: continue with those, or pass another "
                    "folder"
                )
            self.model.load_state_dict(state["model"])
            for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            counts = state["counts"]
            self.bucket, self.step, self.tokens = counts["bucket"], counts["step"], counts["tokens"]
            self.seconds = counts["seconds"]
            self.compiled = self.compiled or state["compiled"]
        except UNREADABLE as error:
            raise TrainingError(f"checkpoint {str(path)!r} cannot be read: remove it to continue without it") from error


def _help(recipe: TrainingRecipe, saved: Path | None, compiled: bool, team: Team) -> None:
    """Run a helper process of a training run until that ends."""
    torch.set_num_threads(1)
    try:
        Pretraining(recipe, compiled=compiled).help(team, saved)
    except TrainingError:
        pass  # the run's own process ended, and tells why
    except BaseException:
        team.leave()
        raise


def vocabulary_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Digest of what decides token ids."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def build_model(recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of the recipe's shape with random weights, its vocabulary padded to a multiple of 16."""
    torch.manual_seed(recipe.seed)
    shape = recipe.shape
    config = LlamaConfig(
        vocab_size=math.ceil(len(tokenizer) / 16) * 16,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        initializer_range=shape.initializer_range,
        max_position_embeddings=shape.longest_context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def recipe_json(recipe: TrainingRecipe) -> str:
    """The settings as one line, by which checkpoints are told apart."""
    return json.dumps(asdict(recipe), sort_keys=True)


def _muon(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")


def _adamw(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, betas=(0.9, 0.95))
