"""Recordings that nobody has recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from choreo_agents.engine.recording.format import (
    RecordedCall,
    RecordedMessage,
    RecordingEnded,
    RecordingHeader,
    RunStarted,
)

HEADER = RecordingHeader(
    model="m",
    fingerprint="f",
    method="choreo",
    seed=0,
    bytes_per_token=100,
    confidential=False,
    keyed="file",
    nonce="",
    proof="",
)


def written(path: Path, *lines: BaseModel, ended: bool = True) -> Path:
    """A recording of these lines."""
    whole = [HEADER, *lines, *([RecordingEnded()] if ended else [])]
    path.write_text("".join(f"{line.model_dump_json()}\n" for line in whole))
    return path


def run_line(number: int = 0, thread: str | None = None, at_s: float = 0.0) -> RunStarted:
    """A run begins."""
    return RunStarted(run=number, at_s=at_s, thread=thread, kept=False, seed=None, input=None)


def call_line(author: str, step: int, submitted_s: float, finished_s: float, **changed: Any) -> RecordedCall:
    """A call of run 0, which reads nothing and says what has its author's name."""
    usual = {
        "run": 0,
        "superstep": step,
        "branch": 0,
        "call": 0,
        "view": (),
        "view_tokens": 0,
        "answer": author,
        "thought": None,
        "header_tokens": 3,
        "first_token_s": submitted_s,
        "tokens": None,
        "sampled": 4,
        "digest": "",
        "text": None,
        "finish_reason": None,
    }
    times = {"submitted_s": submitted_s, "finished_s": finished_s}
    return RecordedCall(author=author, step=step, **(times | usual | changed))


def message_line(name: str, tokens: int = 8, parents: Sequence[str] = (), role: str | None = None) -> RecordedMessage:
    """What calls read or have made."""
    return RecordedMessage(name=name, tokens=tokens, parents=tuple(parents), role=role)
