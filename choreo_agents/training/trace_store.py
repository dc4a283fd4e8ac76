"""Traces on disk: structure as lines of JSON, tokens as tensors. A killed recording can resume.

traces.jsonl            settings, then a line for each trace
tokens-0001.safetensors tokens of the traces that were added by one call, a tensor for each
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from choreo_agents.errors import TrainingError
from choreo_agents.models.files import read_tensors, write_tensors
from choreo_agents.training.journal import Journal, Record, read_journal
from choreo_agents.training.trace import Trace, TraceMessage

TRACES_FILE = "traces.jsonl"
_DEFAULTS = {field.name: field.default for field in fields(TraceMessage) if field.default is not MISSING}


class TraceStore(AbstractContextManager["TraceStore"]):
    """Traces of a recording, each once, whatever interrupts it.

    Tokens are written before the line that names them. A line that was cut off, or whose tokens are missing, is dropped
    when the store is opened: add its trace again. While the store is open, a lock keeps other processes out.

    Args:
        folder: The directory, which is created if need be.
        settings: All that decides the traces, as plain JSON: traces of different recordings never mix.

    Raises:
        InvalidRequestError: The folder holds another recording's traces, or is being written to.
        TrainingError: A line is no trace.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        path = folder / TRACES_FILE
        self._journal = Journal(path, settings)
        try:
            shards = _with_tokens(path, self._journal.records)
            if len(shards) < len(self):
                self._journal.keep(shards)
        except BaseException:
            self._journal.close()
            raise
        self._last_shard = max(shards.values(), default=0)

    def __contains__(self, name: str) -> bool:
        return name in self._journal

    def __len__(self) -> int:
        return len(self._journal.records)

    def add(self, traces: Sequence[Trace], most_positions: int | None = None) -> None:
        """Append traces; they are on disk when this returns. Traces of one call share a file of tokens.

        Args:
            traces: Traces with new ids.
            most_positions: Most positions of a trace.

        Raises:
            TrainingError: A trace has nothing to learn, too many positions, or an old id; then none is written.
        """
        names = [trace.id for trace in traces]
        twice = next((name for i, name in enumerate(names) if name in self or name in names[:i]), None)
        if twice is not None:
            raise TrainingError(f"trace {twice!r} is in {str(self.folder)!r} already: name it otherwise")
        for trace in traces:
            _require_useful(f"trace {trace.id!r}", trace, most_positions)
        if not traces:
            return
        tensors = {str(number): _tokens(trace) for number, trace in enumerate(traces)}
        write_tensors(_shard(self.folder, self._last_shard + 1), tensors)
        self._last_shard += 1
        for number, trace in enumerate(traces):
            place = {"shard": self._last_shard, "tensor": str(number), "digest": digest_of([trace])[:16]}
            self._journal.add(trace.id, {**place, "messages": [_as_record(message) for message in trace.messages]})

    def close(self) -> None:
        """Close the store and release its lock."""
        self._journal.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_traces(folder: Path, most_positions: int | None = None) -> list[Trace]:
    """Read the traces of a store in the order in which they were added, also while it is being written to.

    Args:
        folder: Directory of the store.
        most_positions: Most positions of a trace: the context of the model that is trained.

    Raises:
        TrainingError: A trace is damaged, has nothing to learn, or too many positions; the message names its line.
        InvalidRequestError: A line is no record of a trace.
        OSError: There is no store.
    """
    path = folder / TRACES_FILE
    shards: dict[int, dict[str, Tensor]] = {}
    traces: list[Trace] = []
    for number, (name, record) in enumerate(read_journal(path).items(), start=2):
        where = f"line {number} of {str(path)!r}"
        try:
            shard = int(record["shard"])
            if shard not in shards:
                shards[shard] = read_tensors(_shard(folder, shard))[0]
            trace = _trace(name, record["messages"], shards[shard][record["tensor"]].tolist())
            same = digest_of([trace])[:16] == record["digest"]
        except OSError as error:
            raise TrainingError(f"the tokens of {where} cannot be read: record it again ({error})") from error
        except (LookupError, TypeError, ValueError, AttributeError, TrainingError) as error:
            raise TrainingError(f"{where} is no trace: remove it, or record it again ({error})") from error
        if not same:
            raise TrainingError(f"{where} is not the trace that was written: remove it, or record it again")
        _require_useful(where, trace, most_positions)
        traces.append(trace)
    return traces


def digest_of(traces: Iterable[Trace]) -> str:
    """Return 64 hex digits that identify traces: SHA-256 over all their contents, in order."""
    code = hashlib.sha256()
    for trace in traces:
        content = [trace.id, [[message.tokens, _as_record(message)] for message in trace.messages]]
        code.update(json.dumps(content, sort_keys=True).encode() + b"\n")
    return code.hexdigest()


def _require_useful(where: str, trace: Trace, most_positions: int | None) -> None:
    if not trace.learnt_tokens:
        raise TrainingError(f"{where} has nothing to learn: no token of it was sampled")
    if most_positions is not None and trace.reach > most_positions:
        raise TrainingError(
            f"{where} reaches position {trace.reach}, the model's context ends at {most_positions}: leave it out"
        )


def _shard(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:04}.safetensors"


def _with_tokens(path: Path, records: Mapping[str, Record]) -> dict[str, int]:
    """Return the traces whose tokens are on disk, with the numbers of their files."""
    stored: dict[int, set[str]] = {}
    shards: dict[str, int] = {}
    for number, (name, record) in enumerate(records.items(), start=2):
        try:
            shard, tensor = int(record["shard"]), str(record["tensor"])
        except (LookupError, TypeError, ValueError) as error:
            raise TrainingError(f"line {number} of {str(path)!r} is no trace: remove it") from error
        if shard not in stored:
            stored[shard] = set()
            with suppress(OSError):
                stored[shard] = set(read_tensors(_shard(path.parent, shard))[0])
        if tensor in stored[shard]:
            shards[name] = shard
    return shards


def _tokens(trace: Trace) -> Tensor:
    return torch.tensor([token for message in trace.messages for token in message.tokens], dtype=torch.int32)


def _as_record(message: TraceMessage) -> Record:
    """Return a message as JSON without its tokens and without fields that have their defaults."""
    changed = {name: getattr(message, name) for name, usual in _DEFAULTS.items() if getattr(message, name) != usual}
    return {"name": message.name, "count": len(message.tokens), **changed}


def _trace(name: str, messages: Sequence[Record], tokens: Sequence[int]) -> Trace:
    """Restore a trace from the messages of its line and its tokens."""
    restored: list[TraceMessage] = []
    at = 0
    for message in messages:
        lists = {key: tuple(value) for key, value in message.items() if isinstance(value, list)}
        values: dict[str, Any] = {**message, **lists}
        count = values.pop("count")
        restored.append(TraceMessage(tokens=tuple(tokens[at : at + count]), **values))
        at += count
    return Trace(name, tuple(restored))
