"""Finds the highest of many numbers without sorting them: the highest of each chunk first."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 128
"""Neighbours that are looked at together: rows are a multiple of it."""


def peaks(rows: Tensor) -> Tensor:
    """The highest of each chunk: [rows, words] to [rows, chunks]."""
    return rows.view(len(rows), -1, CHUNK).amax(dim=-1)


def highest(rows: Tensor, tops: Tensor, which: Tensor | None = None) -> Tensor:
    """Where rows are highest, and where they are so first: [n, 1], with these peaks; `which` as for `in_chunks`."""
    places = tops.argmax(dim=-1, keepdim=True)
    return places * CHUNK + in_chunks(rows, places, which).argmax(dim=-1, keepdim=True)


def highest_few(rows: Tensor, tops: Tensor, count: int, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` highest of rows, in descending order, and where they are: [n, count] both.

    Of equal ones any may come first, or be left out.
    """
    if count >= tops.shape[1]:
        return torch.topk(rows if which is None else rows.index_select(0, which), count)
    # As many chunks as numbers are wanted: each of the other chunks is below the last of these.
    places = tops.topk(count, sorted=False).indices
    values, found = in_chunks(rows, places, which).topk(count)
    return values, words_of(places).gather(1, found)


def in_chunks(rows: Tensor, places: Tensor, which: Tensor | None = None) -> Tensor:
    """What stands in chunks of rows: [rows, words] and [n, m] to [n, m * CHUNK].

    The n are the rows that `which` names, int64, [n]; without it all.
    """
    which = torch.arange(len(rows), device=rows.device) if which is None else which
    places = places + which[:, None] * (rows.shape[1] // CHUNK)
    return rows.view(-1, CHUNK).index_select(0, places.flatten()).view(len(which), -1)


def words_of(places: Tensor) -> Tensor:
    """Where the numbers of chunks stand in their rows: [rows, n] to [rows, n * CHUNK]."""
    return (places[..., None] * CHUNK + torch.arange(CHUNK, device=places.device)).flatten(1)
