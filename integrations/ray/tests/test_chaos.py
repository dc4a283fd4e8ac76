"""Runs whose actors are killed end with the words that they should have: a few of `make chaos`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial

from choreo_ray import RayEngine
from torture.chaos import Chaos, Outcome, counted
from torture.chaos_actors import pids

from choreo_agents.tracing import EventList


def test_runs_end_with_their_words_whoever_is_killed(front: Callable[..., RayEngine]) -> None:
    events = EventList()
    engine = front(salt="chaos", sink=events)
    found: list[Outcome] = []
    with closing(Chaos(engine, events, partial(pids, "pool", "tests"), seed=7)) as chaos:
        for number, victim in ((0, "engine"), (1, "engine"), (0, "directory")):
            found.append(chaos.run(number, victim))  # type: ignore[arg-type]
    counts = counted([asdict(each) for each in found])
    assert counts["ended"] == counts["same"] == 3, found
    assert counts["killed"] >= 1, "their victims were there while they ran"
