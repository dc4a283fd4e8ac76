"""Traces on disk: a journal with a line for each trace. A killed recording can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from choreo_agents.errors import TrainingError
from choreo_agents.training.journal import Journal, Record, read_journal
from choreo_agents.training.trace import Trace, TraceMessage

_MESSAGES = TypeAdapter(tuple[TraceMessage, ...])


def add_traces(journal: Journal, traces: Sequence[Trace]) -> None:
    """Append traces to a journal under their ids; they are on disk when this returns.

    Args:
        journal: The recording, whose settings are all that decides the traces.
        traces: Traces with new ids.

    Raises:
        TrainingError: A trace has nothing to learn or an old id; then none is written.
    """
    names = [trace.id for trace in traces]
    twice = next((name for i, name in enumerate(names) if name in journal or name in names[:i]), None)
    if twice is not None:
        raise TrainingError(f"trace {twice!r} is in {str(journal.path)!r} already: use another id")
    idle = next((trace.id for trace in traces if not trace.learnt_tokens), None)
    if idle is not None:
        raise TrainingError(f"trace {idle!r} has nothing to learn: none of its tokens was sampled")
    for trace in traces:
        journal.add(trace.id, {"digest": digest_of([trace])[:16], "messages": _as_records(trace)})


def read_traces(path: Path) -> list[Trace]:
    """Read the traces of a recording in the order in which they were added, also while it is being written to.

    Raises:
        TrainingError: A trace is damaged; the message names its line.
        InvalidRequestError: A line is no record of a trace.
        OSError: There is no journal.
    """
    traces: list[Trace] = []
    for number, (name, record) in enumerate(read_journal(path).items(), start=2):
        where = f"line {number} of {str(path)!r}"
        try:
            trace = Trace(name, _MESSAGES.validate_python(record.get("messages")))
        except (ValueError, TrainingError) as error:
            raise TrainingError(f"{where} is not a trace: remove it, or record it again ({error})") from error
        if digest_of([trace])[:16] != record.get("digest"):
            raise TrainingError(f"{where} was changed after it was written: remove it, or record it again")
        traces.append(trace)
    return traces


def digest_of(traces: Iterable[Trace]) -> str:
    """Return 64 hex digits that identify traces: SHA-256 over all their contents, in order."""
    code = hashlib.sha256()
    for trace in traces:
        code.update(json.dumps([trace.id, _as_records(trace)], sort_keys=True).encode() + b"\n")
    return code.hexdigest()


def _as_records(trace: Trace) -> list[Record]:
    """Return a trace's messages as JSON, without fields that have their defaults."""
    records: list[Record] = _MESSAGES.dump_python(trace.messages, mode="json", exclude_defaults=True)
    return records
