"""Finds the highest of many numbers without sorting them: the highest of each chunk first."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 128
"""Neighbours that are looked at together: rows are a multiple of it."""


def peaks(rows: Tensor) -> Tensor:
    """The highest of each chunk: [rows, words] to [rows, chunks]."""
    return rows.view(len(rows), -1, CHUNK).amax(dim=-1)


def highest(rows: Tensor, tops: Tensor) -> Tensor:
    """Where each row is highest, and where it is so first: [rows, 1], of rows with these peaks."""
    places = tops.argmax(dim=-1, keepdim=True)
    return places * CHUNK + in_chunks(rows, places).argmax(dim=-1, keepdim=True)


def highest_few(rows: Tensor, tops: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest of each row, in descending order, and where they are: [rows, count] both.

    Of equal ones any may come first, or be left out.
    """
    if count >= tops.shape[1]:
        return torch.topk(rows, count)
    # As many chunks as numbers are wanted: each of the other chunks is below the last of these.
    places = tops.topk(count, sorted=False).indices
    values, found = in_chunks(rows, places).topk(count)
    return values, words_of(places).gather(1, found)


def in_chunks(rows: Tensor, places: Tensor) -> Tensor:
    """What stands in chunks of each row: [rows, words] and [rows, n] to [rows, n * CHUNK]."""
    chunks = rows.view(-1, CHUNK)
    if len(rows) > 1:
        places = places + torch.arange(0, len(chunks), rows.shape[1] // CHUNK, device=rows.device)[:, None]
    return chunks.index_select(0, places.flatten()).view(len(rows), -1)


def words_of(places: Tensor) -> Tensor:
    """Where the numbers of chunks stand in their rows: [rows, n] to [rows, n * CHUNK]."""
    return (places[..., None] * CHUNK + torch.arange(CHUNK, device=places.device)).flatten(1)
