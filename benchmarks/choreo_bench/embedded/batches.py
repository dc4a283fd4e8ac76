"""Batches of transcripts of like lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerFast

from choreo_bench.embedded.recipe import TrainingRecipe
from choreo_bench.embedded.transcripts import IGNORED, Encoded, draw_transcripts, encode


@dataclass(frozen=True)
class Batch:
    """Rows of token ids and labels, padded at their ends."""

    IGNORED: ClassVar[int] = IGNORED
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
