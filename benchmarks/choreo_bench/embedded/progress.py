"""How a training run tells how far it has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from choreo_bench.embedded.batches import as_batches
from choreo_bench.embedded.recipe import TrainingRecipe
from choreo_bench.embedded.transcripts import IGNORED, encode, transcripts
from choreo_bench.language import TASKS, draw_problem

SCORED = 32
"""Problems of a task for each intermediate score."""
SCORED_TOKENS = 8192
"""Of a batch, padding included."""


@dataclass(frozen=True)
class BucketProgress:
    """How far a run has come."""

    bucket: int
    buckets: int
    tokens: int
    seconds: float
    loss: float
    """Mean over the last bucket, in nats per learnt token."""


class ProgressListener(Protocol):
    """Hears of a run's progress."""

    def advance(self, progress: BucketProgress) -> None:
        """Another bucket is done."""
        ...

    def wants_scores(self, bucket: int) -> bool:
        """Whether to measure accuracy now."""
        ...

    def scores(self, bucket: int, shares: Mapping[str, float]) -> None:
        """Development accuracy by task, from 0 to 1."""
        ...


@torch.no_grad()
def first_choices(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: TrainingRecipe
) -> dict[str, float]:
    """By task, the share of development transcripts whose every learnt token is the model's first choice.

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
