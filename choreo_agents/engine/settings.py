"""How an engine runs: settings that belong together are one frozen object."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from choreo_agents.attention.backends import BackendName
from choreo_agents.kv.tiers import Stored
from choreo_agents.runtime.timetable import Timetable
from choreo_agents.tracing import EventSink

MethodName = Literal["choreo", "baseline", "naive"]
"""From the cache, or from re-encoded text with or without a prefix cache."""


class Memory(BaseModel):
    """Where an engine keeps KV, and how much of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_budget_bytes: int = Field(1 << 30, ge=1)
    """Upper bound of the KV memory that steps read. What nothing reads or pins leaves it when others need the room, the
    least recently used first, and comes back when it is read."""
    host_bytes: int = Field(0, ge=0)
    """Upper bound of the host memory for what left it."""
    disk: Path | None = None
    """A folder for what has no room there either. Without one it is computed again from its lineage."""
    disk_bytes: int = Field(1 << 34, ge=1)
    """Upper bound of this model's files in that folder."""
    mapped_storage: Stored = "full"
    """How a cache mapper's copies are kept once they have left the KV memory: `"full"`, as they are; `"int8"`, in a
    quarter of what fp32 takes, for which the mapper rounds them when it makes them; `"low-rank"`, not at all: they are
    made again from what they are copies of, bit by bit the same."""


class Scheduling(BaseModel):
    """What a step of an engine holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    step_tokens: int = Field(512, ge=1)
    """Tokens encoded in one forward pass at most; longer prefills are cut into chunks."""
    rows: int = Field(256, ge=1)
    """Requests served at once at most."""
    timetable: Timetable | None = None
    """Writes down what each step holds, or, made by `again()`, prescribes it: to compare two runs bit by bit."""


class Settings(BaseModel):
    """See `Engine.load`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    method: MethodName
    memory: Memory
    scheduling: Scheduling
    backend: BackendName
    seed: int
    sink: EventSink
