"""Traces on disk: each once and whole, wherever the recording was cut, and what is wrong is named by its line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.traces import draw_trace, with_adapters, with_mapped
from support.tuning import full_disk

from choreo_agents.errors import InvalidRequestError, TrainingError
from choreo_agents.training.journal import Journal
from choreo_agents.training.trace import Trace, TraceMessage, add_traces, digest_of, read_traces

SETTINGS = {"task": "debate", "seed": 1}


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of files would wait for the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture
def traces() -> list[Trace]:
    rng = random.Random(3)
    drawn = [draw_trace(rng, 2, longest=5, name=f"Zoë {number}") for number in range(4)]
    made = [with_adapters(with_mapped(trace, rng), [None, "one"], rng) for trace in drawn]
    assert any(message.mapped for trace in made for message in trace.messages)
    told = [replace(message, author="ann", role="assistant") for message in made[0].messages]
    return [Trace(made[0].id, tuple(told)), *made[1:]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "traces.jsonl"


def write(path: Path, traces: list[Trace]) -> None:
    """What is missing of them, two at a time."""
    with Journal(path, SETTINGS) as journal:
        missing = [trace for trace in traces if trace.id not in journal]
        for first in range(0, len(missing), 2):
            add_traces(journal, missing[first : first + 2])
        assert len(journal.records) == len(traces)


def test_what_is_written_is_read(path: Path, traces: list[Trace]) -> None:
    write(path, traces)
    assert read_traces(path) == traces
    assert digest_of(read_traces(path)) == digest_of(traces)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_traces_are_on_disk_as_soon_as_they_are_added(path: Path, traces: list[Trace]) -> None:
    with Journal(path, SETTINGS) as journal:
        for count, trace in enumerate(traces, start=1):
            add_traces(journal, [trace])
            assert read_traces(path) == traces[:count]
        add_traces(journal, [])
        with pytest.raises(InvalidRequestError, match="another run is writing to"):
            Journal(path, SETTINGS)


@pytest.mark.slow
def test_wherever_the_lines_are_cut_a_recording_goes_on(path: Path, traces: list[Trace]) -> None:
    traces = traces[1:]
    write(path, traces)
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")
        assert read_traces(path) == traces[: max(0, lines - 1)], f"cut at byte {length}"
        write(path, traces)
        assert read_traces(path) == traces, f"cut at byte {length}"


def test_useless_traces_are_refused_and_nothing_is_written(path: Path, traces: list[Trace]) -> None:
    empty = Trace("empty", (TraceMessage("m", (5, 6)),))
    with Journal(path, SETTINGS) as journal:
        for useless, reason in (
            (empty, "trace 'empty' has nothing to learn"),
            (traces[0], f"trace '{traces[0].id}' is in"),
        ):
            with pytest.raises(TrainingError, match=reason):
                add_traces(journal, [traces[0], useless])
        assert len(journal.records) == 0
        assert read_traces(path) == []
        add_traces(journal, traces[:1])
        with pytest.raises(TrainingError, match=f"trace '{traces[0].id}' is in"):
            add_traces(journal, traces[:2])
        assert len(journal.records) == 1


def damaged(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change the third line, the second trace's."""
    lines = path.read_text().splitlines()
    record = json.loads(lines[2])
    change(record)
    lines[2] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.pop("messages"), "is not a trace: remove it"),
        (lambda r: r.update(messages=[1]), "is not a trace: remove it"),
        (lambda r: r["messages"][0].update(colour="red"), "is not a trace: remove it"),
        (lambda r: r["messages"][0].update(tokens="5"), "is not a trace: remove it"),
        (lambda r: r["messages"][1].update(parents=["nobody"], offsets=[0]), "is not a trace: .*'nobody'"),
    ],
)
def test_what_is_damaged_is_named_by_its_line(
    path: Path, traces: list[Trace], change: Callable[[dict[str, object]], object], reason: str
) -> None:
    write(path, traces)
    damaged(path, change)
    with pytest.raises(TrainingError, match=rf"line 3 of '.*traces\.jsonl' {reason}"):
        read_traces(path)


def test_two_recordings_never_mix(path: Path, traces: list[Trace]) -> None:
    write(path, traces)
    with pytest.raises(InvalidRequestError, match="seed 1, not 2"):
        Journal(path, SETTINGS | {"seed": 2})
    with pytest.raises(FileNotFoundError):
        read_traces(path.parent / "nowhere")


def test_every_part_of_a_trace_counts_for_the_digest(traces: list[Trace]) -> None:
    message = TraceMessage("m", (5, 6, 7), learn=(1, 2))
    plain = Trace("t", (message,))
    others = [
        replace(message, tokens=(5, 6, 8)),
        replace(message, learn=(1, 3)),
        replace(message, position=1),
        replace(message, adapter="a"),
        replace(message, author="a"),
        replace(message, name="n"),
    ]
    digests = {digest_of([plain]), digest_of([Trace("u", (message,))]), digest_of([plain, plain]), digest_of([])}
    digests |= {digest_of([Trace("t", (other,))]) for other in others}
    assert len(digests) == 10
    assert digest_of(traces) != digest_of(traces[::-1])


def test_a_full_disk_leaves_the_traces_that_were_there(path: Path, traces: list[Trace]) -> None:
    """What does not fit is added again."""
    with Journal(path, SETTINGS) as journal:
        add_traces(journal, traces[:1])
        line = path.stat().st_size
        with full_disk(line + 20), pytest.raises(OSError, match=r"written|large"):
            add_traces(journal, traces[1:2])
        assert traces[1].id not in journal and read_traces(path) == traces[:1]
        assert path.stat().st_size == line, "half a line would spoil the next"
        add_traces(journal, traces[1:2])
    assert read_traces(path) == traces[:2]
    write(path, traces)
    assert read_traces(path) == traces
