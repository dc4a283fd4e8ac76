"""What recordings say that calls have waited for, and what they were encoded from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.traced import call_line, message_line, node_line, run_line, written

from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.simulating.trace import RecordedTrace, TracedCall, hurried, read_trace


def after(trace: RecordedTrace) -> dict[str, set[str]]:
    """Who waited for whom, by name."""
    [run] = trace.runs
    names = [task.author if isinstance(task, TracedCall) else task.node for task in run.tasks]
    return {name: {names[place] for place in task.after} for name, task in zip(names, run.tasks, strict=True)}


def test_a_superstep_waits_for_the_one_before_it(tmp_path: Path) -> None:
    lines = [message_line(name) for name in ("ann", "bob", "cleo")]
    path = written(
        tmp_path / "run",
        run_line(),
        *lines,
        call_line("ann", 1, 0.1, 0.4),
        call_line("bob", 1, 0.1, 0.6),
        call_line("cleo", 2, 0.7, 0.9),
    )
    assert after(read_trace(path)) == {"ann": set(), "bob": set(), "cleo": {"ann", "bob"}}


def test_what_stands_in_one_superstep_waits_for_nothing_in_it(tmp_path: Path) -> None:
    """One was so slow to begin that the other had ended: that was chance."""
    path = written(
        tmp_path / "run",
        run_line(),
        message_line("ann"),
        message_line("bob"),
        call_line("ann", 1, 0.1, 0.2),
        node_line("tool", 1, 0.3, 0.35),
        call_line("bob", 1, 0.4, 0.5),
        node_line("tool", 1, 0.6, 0.7, branch=1),
    )
    assert all(not waited for waited in after(read_trace(path)).values())


def test_calls_of_one_node_follow_each_other_and_functions_take_their_time(tmp_path: Path) -> None:
    path = written(
        tmp_path / "run",
        run_line(),
        message_line("ann"),
        call_line("ann", 1, 0.1, 0.2),
        call_line("ann", 1, 0.3, 0.4, call=1),
        node_line("tool", 2, 0.5, 0.75),
    )
    trace = read_trace(path)
    [first, second, tool] = trace.runs[0].tasks
    assert (first.after, second.after, tool.after) == ((), (0,), (1,)), "only what comes last before it is named"
    assert not isinstance(tool, TracedCall) and tool.took_s == pytest.approx(0.25)
    [*_, same] = hurried(trace).runs[0].tasks
    assert not isinstance(same, TracedCall) and same.took_s == 0.0 and same.after == (1,)


def test_supersteps_of_another_graph_are_told_by_times_alone(tmp_path: Path) -> None:
    path = written(
        tmp_path / "run",
        run_line(),
        message_line("team|ann"),
        message_line("bob"),
        call_line("team|ann", 1, 0.1, 0.2),
        call_line("bob", 1, 0.3, 0.4),
    )
    assert after(read_trace(path))["bob"] == {"team|ann"}


def test_waiting_for_a_first_token_counts_from_when_a_call_was_due(tmp_path: Path) -> None:
    path = written(
        tmp_path / "run",
        run_line(at_s=1.0),
        message_line("ann"),
        message_line("bob"),
        call_line("ann", 1, 1.25, 2.0, first_s=1.5),
        call_line("bob", 2, 2.5, 4.0, first_s=3.0),
    )
    trace = read_trace(path)
    assert trace.runs[0].first_token_s() == [0.5, 1.0] and trace.makespan_s == 3.0


def test_what_all_runs_are_told_alike_is_known(tmp_path: Path) -> None:
    path = written(
        tmp_path / "run",
        run_line(),
        message_line("root", role="system"),
        message_line("notes", parents=["root"], role="system"),
        message_line("question", parents=["root"]),
        message_line("summary", parents=["question"], role="system"),
        message_line("ann", tokens=9, parents=["root", "question"]),
        call_line("ann", 1, 0.1, 0.2, reads=("root", "question")),
    )
    trace = read_trace(path)
    assert {name for name, each in trace.messages.items() if each.is_common} == {"root", "notes"}
    [call] = trace.calls
    assert (call.reads, call.made, call.decoded, call.header, call.samples) == (
        ("root", "question"),
        "ann",
        "ann",
        3,
        4,
    )


def test_runs_of_a_thread_follow_each_other(tmp_path: Path) -> None:
    calls = [call_line("ann", 1, 0.1, 0.2, run=number) for number in range(4)]
    runs = [run_line(number, thread) for number, thread in enumerate(["one", None, "one", None])]
    trace = read_trace(written(tmp_path / "run", *runs, run_line(4, "silent"), message_line("ann"), *calls))
    assert [len(thread) for thread in trace.threads()] == [2, 1, 1] and len(trace.runs) == 4


def test_a_recording_that_was_cut_is_played_up_to_there(tmp_path: Path) -> None:
    path = written(tmp_path / "run", run_line(), message_line("ann"), call_line("ann", 1, 0.1, 0.2), ended=False)
    [note] = read_trace(path).notes
    assert "is not whole" in note and "line 4" in note


def test_what_cannot_be_played_is_refused(tmp_path: Path) -> None:
    silent = written(tmp_path / "silent", run_line())
    with pytest.raises(InvalidRequestError, match="has no calls of agents"):
        read_trace(silent)
    calls = [call_line("ann", 1, 0.1, 0.2), call_line("ann", 2, 0.3, 0.4, model="n")]
    with pytest.raises(InvalidRequestError, match=re.escape("calls of 2 models (m, n)")):
        read_trace(written(tmp_path / "two", run_line(), message_line("ann"), *calls))
    for number, lines in enumerate(
        [
            [call_line("ann", 1, 0.1, 0.2)],
            [message_line("ann"), call_line("ann", 1, 0.1, 0.2, reads=("gone",))],
            [message_line("ann", parents=["gone"]), call_line("ann", 1, 0.1, 0.2)],
        ]
    ):
        with pytest.raises(InvalidRequestError, match=r"is damaged: message '(ann|gone)' is read before"):
            read_trace(written(tmp_path / f"damaged {number}", run_line(), *lines))
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(InvalidRequestError, match="is no recording"):
        read_trace(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nowhere")
