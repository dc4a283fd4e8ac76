"""Runs whose actors are killed end with the words that they should have: a few of `make chaos`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from choreo_ray import RayEngine
from torture import chaos_actors
from torture.chaos import Chaos, Outcome, counted, main
from torture.chaos_actors import pids

from choreo_agents import Engine
from choreo_agents.tracing import EventList


@pytest.mark.slow
def test_runs_end_with_their_words_whoever_is_killed(router: Callable[..., RayEngine]) -> None:
    events = EventList()
    engine = router(sink=events)
    found: list[Outcome] = []
    with closing(Chaos(engine, events, partial(pids, "pool", "tests"), seed=7)) as chaos:
        while len(found) < 20 and not any(each.killed for each in found):  # a quick run may be over before
            found.append(chaos.run(len(found)))
    counts = counted([asdict(each) for each in found])
    assert counts["ended"] == counts["same"] == len(found), found
    assert counts["killed"] >= 1, "their engines were there while they ran"


ENDED = Outcome(0, "debate", True, True, True, "", 9, 1, 100, 20, 0, 1.5)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """What becomes of the next runs, none of which needs an engine; it says which were asked for."""
    coming: list[Outcome] = []

    @contextmanager
    def started(sink: Any) -> Iterator[tuple[None, None]]:
        yield None, None

    def run(self: Chaos, number: int) -> Outcome:
        return replace(coming.pop(0), number=number)

    monkeypatch.setattr(chaos_actors, "started", started)
    monkeypatch.setattr(Chaos, "run", run)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: SimpleNamespace(close=lambda: None))
    return coming


def test_chaos_goes_on_where_it_was_and_fails_for_what_hangs_or_says_something_else(
    played: list[Outcome], tmp_path: Path
) -> None:
    asked = ["--engines", "3", "--folder", str(tmp_path)]
    not_killed, hangs = replace(ENDED, killed=False), replace(ENDED, ended=False, same=False)
    played += [ENDED, not_killed, hangs]
    assert main(asked) == 1 and not played, "whatever holds it would hold the next"
    journal = tmp_path / "seed-0.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [each["number"] for each in lines] == [0, 1, 2]
    journal.write_text("".join(json.dumps(each) + "\n" for each in lines[:2]))
    played += [ENDED] * 2
    assert main(asked) == 0 and not played, "one run that was killed was there already"
    assert [json.loads(line)["number"] for line in journal.read_text().splitlines()] == [0, 1, 2, 3]
    journal.write_text(journal.read_text() + json.dumps(asdict(replace(ENDED, same=False))) + "\n")
    assert main(asked) == 1, "it said something else"
