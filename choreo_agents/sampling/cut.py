"""Rows with a small top-k: what it keeps is cut out of them, and nothing else is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from choreo_agents.sampling.contest import Contest, contest_of
from choreo_agents.sampling.draw import Asked, Draw
from choreo_agents.sampling.likeliest import CHUNK, highest_few
from choreo_agents.sampling.nucleus import sums
from choreo_agents.sampling.rows import StepRows
from choreo_agents.sampling.workspace import Workspace

ROOM_FOR_TIES = 32
_STEP = 32


def cut_rows(
    work: Workspace, step: StepRows, draws: Mapping[int, Draw], rows: Sequence[int]
) -> tuple[Contest, Sequence[int]]:
    """The contest of some rows of a step, and the places in `rows` of those in which more words are tied with the k-th
    than were cut out: what these say does not count.
    """
    mine = [draws[row] for row in rows]
    wanted = max(draw.sampling.top_k for draw in mine) + ROOM_FOR_TIES
    count = min(-(-wanted // _STEP) * _STEP, work.width)
    width = -(-count // CHUNK) * CHUNK
    values = torch.full((len(rows), width), float("-inf"), dtype=torch.float32, device=work.device)
    ids = torch.zeros((len(rows), width), dtype=torch.int32, device=work.device)
    for block in step.blocks(rows, min(count * CHUNK, work.width)):
        best, found = highest_few(block.words, block.tops, count, block.which)
        values[list(block.places), :count], ids[list(block.places), :count] = best, found.to(torch.int32)
    last = torch.tensor([draw.sampling.top_k - 1 for draw in mine], device=work.device)[:, None]
    least = values.gather(1, last)
    tied = (values[:, count - 1 : count] == least) & (least > float("-inf")) & (count < work.width)
    values.masked_fill_(values < least, float("-inf"))
    asked, top = Asked.by(mine, work.device), values[:, :1].clone()
    weights = total = None
    if asked.top_p is not None:
        weights = torch.exp2((values - top) * asked.scale)
        total = sums(weights)

    def whole(row: int) -> tuple[Tensor, Tensor]:
        return values[row : row + 1], ids[row]

    return contest_of(asked, values, ids, top, whole, weights, total), tied[:, 0].nonzero()[:, 0].tolist()
