"""Traces that nobody has recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from choreo_agents.engine.recording import (
    RecordedCall,
    RecordedMessage,
    RecordedNode,
    RecordingEnded,
    RecordingHeader,
    RunStarted,
)
from choreo_agents.lab.simulating.costs import ServingCosts
from choreo_agents.lab.simulating.trace import RecordedTrace, Task, TracedCall, TracedFunction, TracedMessage, TracedRun

COSTS = ServingCosts(
    call_s=0.002,
    copy_s=0.004,
    copy_bytes_per_s=1e6,
    encode_tokens_per_s=1000.0,
    step_s=0.01,
    row_s=0.001,
    front_s=0.0,
    answer_s=0.0,
    lookup_s=0.0,
    bytes_per_token=100,
)
"""Of which times are easily reckoned."""
CONDITIONS = {"model": "m", "method": "choreo", "threads": "1", "device": "cpu", "torch": "1", "dtype": "fp32"}
HEADER = RecordingHeader(
    model="m",
    conditions=CONDITIONS,
    seed=0,
    step_tokens=64,
    rows=16,
    kv_budget_bytes=None,
    bytes_per_token=100,
    bits=False,
    confidential=False,
    keyed="file",
    nonce="",
    proof="",
)


@dataclass(frozen=True)
class Spoken:
    """A call of a run."""

    reads: Sequence[str] = ()
    made: str = ""
    """By default a name of its own."""
    header: int = 4
    samples: int = 8
    closing: int = 1
    """Tokens behind what it samples."""
    after: Sequence[int] = ()
    author: str = "ann"


@dataclass(frozen=True)
class Waited:
    """A function of a run."""

    took_s: float = 0.5
    after: Sequence[int] = ()


def trace_of(
    runs: Sequence[Sequence[Spoken | Waited]],
    messages: Mapping[str, tuple[int, Sequence[str]]] | None = None,
    *,
    common: Sequence[str] = (),
    header: RecordingHeader = HEADER,
    threads: Sequence[str | None] = (),
) -> RecordedTrace:
    """A trace of these runs.

    Args:
        runs: What is done in each.
        messages: What calls read and none of them makes: tokens and parents, by name.
        common: Those of them that all copies share.
        header: Of the recording.
        threads: Of the runs; by default none.
    """
    known = {
        name: TracedMessage(name, tokens, tuple(parents), name in common)
        for name, (tokens, parents) in (messages or {}).items()
    }
    made: list[TracedRun] = []
    for place, run in enumerate(runs):
        tasks: list[Task] = []
        for number, each in enumerate(run):
            if isinstance(each, Waited):
                tasks.append(TracedFunction(number, "tool", each.took_s, tuple(each.after), 0.0))
                continue
            name = each.made or f"said {place}.{number}"
            known[name] = TracedMessage(name, each.header + each.samples + each.closing, tuple(each.reads), False)
            plain = (each.header, each.samples, max(1, each.samples), tuple(each.after), 0.0, 0.0, 0.0)
            tasks.append(TracedCall(number, each.author, tuple(each.reads), name, name, *plain))
        made.append(TracedRun(threads[place] if threads else None, tuple(tasks), 0.0))
    return RecordedTrace(Path("trace.jsonl"), header, known, tuple(made))


def lone_calls(count: int, header: RecordingHeader = HEADER, **said: int) -> RecordedTrace:
    """Calls that know nothing of each other, each a run of its own."""
    return trace_of([[Spoken(**said)] for _ in range(count)], header=header)


def with_limits(rows: int, step_tokens: int) -> RecordingHeader:
    """Of an engine with other bounds of a step."""
    return HEADER.model_copy(update={"rows": rows, "step_tokens": step_tokens})


@st.composite
def random_traces(draw: st.DrawFn) -> RecordedTrace:
    """Runs of calls that read what was there before, and functions between them."""
    inputs: dict[str, tuple[int, list[str]]] = {}
    for number in range(draw(st.integers(1, 4))):
        parents = draw(st.lists(st.sampled_from(sorted(inputs)), unique=True, max_size=2)) if inputs else []
        inputs[f"input {number}"] = draw(st.integers(1, 150)), parents
    runs: list[list[Spoken | Waited]] = []
    for place in range(draw(st.integers(1, 3))):
        tasks: list[Spoken | Waited] = []
        for number in range(draw(st.integers(1, 6))):
            after = draw(st.lists(st.integers(0, number - 1), unique=True, max_size=2)) if number else []
            if number and draw(st.integers(0, 5)) == 0:
                tasks.append(Waited(draw(st.sampled_from([0.0, 0.3])), after))
                continue
            # Whoever reads what a call has said waits for that.
            said = [f"said {place}.{each}" for each in after if isinstance(tasks[each], Spoken)]
            reads = [*draw(st.lists(st.sampled_from(sorted(inputs)), unique=True, max_size=3)), *said]
            lengths = draw(st.integers(1, 70)), draw(st.integers(0, 9)), draw(st.integers(0, 2))
            tasks.append(Spoken(reads, "", *lengths, after, draw(st.sampled_from(["ann", "bob"]))))
        if not any(isinstance(task, Spoken) for task in tasks):
            tasks.append(Spoken())
        runs.append(tasks)
    common = draw(st.lists(st.sampled_from(sorted(inputs)), unique=True))
    common = [name for name in common if set(inputs[name][1]) <= set(common)]
    return trace_of(runs, inputs, common=common, threads=draw(st.sampled_from([(), ["one thread"] * len(runs)])))


def costs_of(**changed: float | None) -> ServingCosts:
    """`COSTS` but for these."""
    return replace(COSTS, **changed)  # type: ignore[arg-type]


def written(path: Path, *lines: BaseModel, ended: bool = True) -> Path:
    """A recording of these lines."""
    whole = [HEADER, *lines, *([RecordingEnded()] if ended else [])]
    path.write_text("".join(f"{line.model_dump_json()}\n" for line in whole))
    return path


def run_line(number: int = 0, thread: str | None = None, at_s: float = 0.0) -> RunStarted:
    """A run begins."""
    return RunStarted(run=number, at_s=at_s, thread=thread, kept=False, seed=None, given=None, before=None)


def call_line(author: str, step: int, asked_s: float, said_s: float, **changed: Any) -> RecordedCall:
    """A call of run 0, which reads nothing and says what has its author's name."""
    usual = {
        "run": 0,
        "superstep": step,
        "branch": 0,
        "call": 0,
        "message": "",
        "model": "m",
        "seed": None,
        "read": 0,
        "reads": (),
        "made": author,
        "thought": None,
        "header": 3,
        "most": 9,
        "first_s": asked_s,
        "request": "",
        "tokens": None,
        "count": 4,
        "said": "",
        "words": None,
        "finish": None,
    }
    return RecordedCall(author=author, step=step, asked_s=asked_s, said_s=said_s, **(usual | changed))


def node_line(node: str, step: int, began_s: float, ended_s: float, branch: int = 0) -> RecordedNode:
    """A function of run 0."""
    return RecordedNode(
        run=0,
        node=node,
        step=step,
        branch=branch,
        given="",
        outcome="result",
        result=None,
        began_s=began_s,
        ended_s=ended_s,
    )


def message_line(name: str, tokens: int = 8, parents: Sequence[str] = (), role: str | None = None) -> RecordedMessage:
    """What calls read or have made."""
    return RecordedMessage(name=name, tokens=tokens, parents=tuple(parents), role=role)
