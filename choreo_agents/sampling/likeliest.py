"""Top-k over long rows without sorting: first the peak of each chunk, then the chunks with the highest peaks."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 128
"""Numbers in a chunk; lengths of rows are multiples of it."""


def peaks(rows: Tensor) -> Tensor:
    """Return the highest number of each chunk: [rows, words] to [rows, chunks]."""
    return rows.view(len(rows), -1, CHUNK).amax(dim=-1)


def highest(rows: Tensor, tops: Tensor, which: Tensor | None = None) -> Tensor:
    """Return the index of the first maximum of each row, [n, 1], given its peaks; `which` as for `in_chunks`."""
    places = tops.argmax(dim=-1, keepdim=True)
    return places * CHUNK + in_chunks(rows, places, which).argmax(dim=-1, keepdim=True)


def highest_few(rows: Tensor, tops: Tensor, count: int, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the `count` highest numbers of each row, descending, and their indices, both [n, count].

    Equal numbers may come in any order, and any of them may be left out.
    """
    if count >= tops.shape[1]:
        return torch.topk(rows if which is None else rows.index_select(0, which), count)
    # `count` chunks are enough: every other chunk is below the `count` peaks of these.
    places = tops.topk(count, sorted=False).indices
    values, indices = in_chunks(rows, places, which).topk(count)
    return values, words_of(places).gather(1, indices)


def in_chunks(rows: Tensor, places: Tensor, which: Tensor | None = None) -> Tensor:
    """Gather chunks of rows: [rows, words] and chunk indices [n, m] to [n, m * CHUNK].

    `which` are the n rows, int64, [n]; None: all.
    """
    which = torch.arange(len(rows), device=rows.device) if which is None else which
    places = places + which[:, None] * (rows.shape[1] // CHUNK)
    return rows.view(-1, CHUNK).index_select(0, places.flatten()).view(len(which), -1)


def words_of(places: Tensor) -> Tensor:
    """Return the indices in their rows of the numbers of chunks: [rows, n] to [rows, n * CHUNK]."""
    return (places[..., None] * CHUNK + torch.arange(CHUNK, device=places.device)).flatten(1)
