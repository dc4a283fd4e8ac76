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
from choreo_agents.training.trace import Trace, TraceMessage
from choreo_agents.training.trace_store import TRACES_FILE, TraceStore, digest_of, read_traces

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


def write(folder: Path, traces: list[Trace]) -> None:
    """What is missing of them, two at a time."""
    with TraceStore(folder, SETTINGS) as store:
        missing = [trace for trace in traces if trace.id not in store]
        for first in range(0, len(missing), 2):
            store.add(missing[first : first + 2])
        assert len(store) == len(traces)


def by_id(traces: list[Trace]) -> list[Trace]:
    return sorted(traces, key=lambda trace: trace.id)


def test_what_is_written_is_read(tmp_path: Path, traces: list[Trace]) -> None:
    folder = tmp_path / "new" / "store"
    write(folder, traces)
    assert read_traces(folder) == traces
    assert digest_of(read_traces(folder)) == digest_of(traces)
    assert sorted(path.name for path in folder.iterdir()) == [
        "tokens-0001.safetensors",
        "tokens-0002.safetensors",
        TRACES_FILE,
    ]


def test_traces_are_on_disk_as_soon_as_they_are_added(tmp_path: Path, traces: list[Trace]) -> None:
    with TraceStore(tmp_path, SETTINGS) as store:
        for count, trace in enumerate(traces, start=1):
            store.add([trace])
            assert read_traces(tmp_path) == traces[:count]
        store.add([])
        with pytest.raises(InvalidRequestError, match="is being written to by another run"):
            TraceStore(tmp_path, SETTINGS)


@pytest.mark.slow
def test_wherever_the_lines_are_cut_a_recording_goes_on(tmp_path: Path, traces: list[Trace]) -> None:
    traces = traces[1:]
    write(tmp_path, traces)
    path = tmp_path / TRACES_FILE
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")
        assert read_traces(tmp_path) == traces[: max(0, lines - 1)], f"cut at byte {length}"
        write(tmp_path, traces)
        assert read_traces(tmp_path) == traces, f"cut at byte {length}"


def test_wherever_tokens_are_cut_they_are_recorded_again(tmp_path: Path, traces: list[Trace]) -> None:
    write(tmp_path, traces)
    shard = tmp_path / "tokens-0001.safetensors"
    whole, lines = shard.read_bytes(), (tmp_path / TRACES_FILE).read_bytes()
    for length in range(len(whole)):
        shard.write_bytes(whole[:length])
        (tmp_path / TRACES_FILE).write_bytes(lines)
        with pytest.raises(TrainingError, match=r"the tokens of line 2 of '.*traces\.jsonl' cannot be read"):
            read_traces(tmp_path)
        with TraceStore(tmp_path, SETTINGS) as store:
            assert [trace.id in store for trace in traces] == [False, False, True, True], f"cut at byte {length}"
        write(tmp_path, traces)
        assert by_id(read_traces(tmp_path)) == by_id(traces), f"cut at byte {length}"


def test_tokens_without_lines_are_written_over(tmp_path: Path, traces: list[Trace]) -> None:
    """Killed between the two: the tokens were there first."""
    write(tmp_path, traces[:2])
    lines = (tmp_path / TRACES_FILE).read_bytes()
    write(tmp_path, traces)
    (tmp_path / TRACES_FILE).write_bytes(lines)
    other = [traces[3], traces[2]]
    write(tmp_path, [*traces[:2], *other])
    assert read_traces(tmp_path) == [*traces[:2], *other]


def test_tokens_that_are_gone_are_recorded_again(tmp_path: Path, traces: list[Trace]) -> None:
    write(tmp_path, traces)
    (tmp_path / "tokens-0001.safetensors").unlink()
    write(tmp_path, traces)
    assert read_traces(tmp_path) == [*traces[2:], *traces[:2]]
    write(tmp_path, traces)


def test_useless_traces_are_refused_and_nothing_is_written(tmp_path: Path, traces: list[Trace]) -> None:
    empty = Trace("empty", (TraceMessage("m", (5, 6)),))
    far = Trace("far", (TraceMessage("m", (5, 6), position=1999, learn=(1, 2)),))
    with TraceStore(tmp_path, SETTINGS) as store:
        for useless, reason in (
            (empty, "trace 'empty' has nothing to learn"),
            (far, "trace 'far' reaches position 2001, the model's context ends at 1000"),
            (traces[0], f"trace '{traces[0].id}' is in"),
        ):
            with pytest.raises(TrainingError, match=reason):
                store.add([traces[0], useless], most_positions=1000 if useless is far else None)
        assert len(store) == 0
        assert read_traces(tmp_path) == []
        store.add(traces[:1])
        with pytest.raises(TrainingError, match=f"trace '{traces[0].id}' is in"):
            store.add(traces[:2])
        assert len(store) == 1


def damaged(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change the third line, the second trace's."""
    path = folder / TRACES_FILE
    lines = path.read_text().splitlines()
    record = json.loads(lines[2])
    change(record)
    lines[2] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.pop("messages"), "is no trace: remove it"),
        (lambda r: r.update(messages=[1]), "is no trace: remove it"),
        (lambda r: r["messages"][0].update(colour="red"), "is no trace: remove it"),
        (lambda r: r["messages"][0].update(count=r["messages"][0]["count"] - 1), "is no"),
        (lambda r: r["messages"][0].update(position=300), "is no"),
        (lambda r: r["messages"][1].update(parents=["nobody"], offsets=[0]), "is no trace: .*'nobody'"),
        (lambda r: r.update(tensor="0"), "is no"),
        (lambda r: r.update(tensor="7"), "is no trace: remove it"),
        (lambda r: r.update(shard="x"), "is no trace: remove it"),
        (lambda r: r.update(key="other"), "is not the trace that was written"),
    ],
)
def test_what_is_damaged_is_named_by_its_line(
    tmp_path: Path, traces: list[Trace], change: Callable[[dict[str, object]], object], reason: str
) -> None:
    write(tmp_path, traces)
    damaged(tmp_path, change)
    with pytest.raises(TrainingError, match=rf"line 3 of '.*traces\.jsonl' {reason}"):
        read_traces(tmp_path)


def test_a_line_that_names_no_tokens_is_no_trace(tmp_path: Path, traces: list[Trace]) -> None:
    write(tmp_path, traces)
    damaged(tmp_path, lambda record: record.pop("shard"))
    errors = []  # that what was opened is closed is not left to the end of the traceback
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"line 3 of '.*traces\.jsonl' is no trace") as error:
            TraceStore(tmp_path, SETTINGS)
        errors.append(error)


def test_a_trace_that_is_too_long_for_the_model_is_named_by_its_line(tmp_path: Path, traces: list[Trace]) -> None:
    reach = max(trace.reach for trace in traces)
    longest = next(number for number, trace in enumerate(traces) if trace.reach == reach)
    write(tmp_path, traces)
    assert read_traces(tmp_path, reach) == traces
    with pytest.raises(TrainingError, match=rf"line {longest + 2} of '.*' reaches position {reach}"):
        read_traces(tmp_path, reach - 1)


def test_two_recordings_never_mix(tmp_path: Path, traces: list[Trace]) -> None:
    write(tmp_path, traces)
    with pytest.raises(InvalidRequestError, match="seed 1, not 2"):
        TraceStore(tmp_path, SETTINGS | {"seed": 2})
    with pytest.raises(FileNotFoundError):
        read_traces(tmp_path / "nowhere")


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


def test_a_full_disk_leaves_the_traces_that_were_there(tmp_path: Path, traces: list[Trace]) -> None:
    """Whether the tokens or the line do not fit; what does not is added again."""
    with TraceStore(tmp_path, SETTINGS) as store:
        store.add(traces[:1])
        line = (tmp_path / TRACES_FILE).stat().st_size
        for most in (10, line + 20):
            with full_disk(most), pytest.raises(OSError, match=r"written|large"):
                store.add(traces[1:2])
            assert traces[1].id not in store and read_traces(tmp_path) == traces[:1]
            assert (tmp_path / TRACES_FILE).stat().st_size == line, "half a line would spoil the next"
        store.add(traces[1:2])
    assert read_traces(tmp_path) == traces[:2]
    write(tmp_path, traces)
    assert read_traces(tmp_path) == traces
