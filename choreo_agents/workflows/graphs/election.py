"""Counts votes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def elect(votes: Sequence[str], ballots: Sequence[str | None], *, lead: str = "", seats: int = 1) -> list[int]:
    """The candidates with most votes, as indices: the most votes first, the first of equals before the others.

    Args:
        votes: What voters said: anything up to `lead`, then a ballot.
        ballots: What a vote for each candidate says; None if nobody can vote for it. Of candidates with one ballot the
            first gets the votes.
        lead: What a vote comes after.
        seats: How many are elected, if there are so many.
    """
    cast = Counter(vote.rpartition(lead)[2].strip() if lead else vote.strip() for vote in votes)
    first: dict[str, int] = {}
    for index, ballot in enumerate(ballots):
        if ballot is not None:
            first.setdefault(ballot.strip(), index)
    ranked = sorted(first, key=lambda ballot: (-cast[ballot], first[ballot]))
    others = [index for index in range(len(ballots)) if index not in first.values()]
    return [*(first[ballot] for ballot in ranked), *others][:seats]
