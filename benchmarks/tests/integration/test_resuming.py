"""A command that is killed and started again ends with what it would have ended with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_support.commands import Choreo
from bench_support.commands import choreo as run

ITEMS, METHODS = 60, ("choreo", "baseline")
COMMAND = ("eval", "direct", "--n", str(ITEMS), "--method", ",".join(METHODS), "--steps", "2", "--kv-gib", "0.05")


@pytest.fixture(scope="module")
def choreo() -> Iterator[Choreo]:
    made = Choreo()
    yield made
    made.close()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    path = tmp_path_factory.mktemp("whole") / "results.jsonl"
    run(*COMMAND, "--out", str(path))
    return results(path)


def results(path: Path) -> dict[tuple[str, str], Any]:
    """By variant and item, each once."""
    _, *lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = {(record["variant"], record["item"]): record for record in records}
    assert len(found) == len(records), "nothing was done twice"
    return found


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [(30,), pytest.param((2, 45, 100), marks=pytest.mark.slow)], ids=["once", "several times"]
)
def test_a_killed_run_goes_on_where_it_stopped(
    choreo: Choreo, uninterrupted: dict[tuple[str, str], Any], tmp_path: Path, kills: tuple[int, ...]
) -> None:
    path = tmp_path / "results.jsonl"
    command = (*COMMAND, "--out", str(path))
    for lines in kills:
        choreo.killed(*command, when=lambda lines=lines: lines_in(path) >= lines)  # type: ignore[misc]
        # Some may have come between the last look and the signal; the line before the results says what they are.
        assert lines - 1 <= len(results_so_far(path)) < len(METHODS) * ITEMS
    before = results_so_far(path)
    choreo.start(*command)
    assert choreo.ended() == 0
    found = results(path)
    assert set(found) == {(method, f"test {number}") for method in METHODS for number in range(ITEMS)}
    assert list(found)[: len(before)] == list(before), "what was known is kept as it was"
    assert found == uninterrupted
    whole = path.read_bytes()
    choreo.start(*command)
    assert choreo.ended() == 0 and path.read_bytes() == whole, "there is nothing left to do"


def results_so_far(path: Path) -> dict[tuple[str, str], Any]:
    """The last line may be torn."""
    whole = path.with_name("whole.jsonl")
    whole.write_bytes(path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1])
    return results(whole)
