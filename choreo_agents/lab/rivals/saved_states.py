"""LangGraph's own checkpointer in a file, and what of it our channels take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from choreo_agents.lab.rivals.base import Absent


@contextmanager
def saved_states(path: Path) -> Iterator[Any]:
    """A checkpointer that keeps states in a file; raises `Absent` if it is not installed."""
    try:
        from langgraph.checkpoint.sqlite import SqliteSaver  # noqa: PLC0415 - no dependency of ours
    except ImportError as error:
        raise Absent(f"pip install langgraph-checkpoint-sqlite ({error})") from error
    with SqliteSaver.from_conn_string(str(path)) as saver:
        yield saver


def bytes_by_channel(saver: Any, channels: Sequence[str]) -> dict[str, int]:
    """Bytes that a file has of each of these channels, in states and in what nodes have written; `""`: of all."""
    found = dict.fromkeys(("", *channels), 0)
    for saved in saver.list(None):
        values = saved.checkpoint["channel_values"]
        found[""] += len(saver.serde.dumps_typed(saved.checkpoint)[1])
        for name in channels:
            found[name] += len(saver.serde.dumps_typed(values[name])[1]) if name in values else 0
    for name, size in saver.conn.execute("SELECT channel, sum(length(value)) FROM writes GROUP BY channel").fetchall():
        found[""] += size
        if name in found:
            found[name] += size
    return found
