"""How an engine runs: settings that belong together are one frozen object."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from choreo_agents.arguments import Options
from choreo_agents.attention.backends import AttentionBackend, BackendName, require_backend
from choreo_agents.runtime.scheduler import FirstComeFirstServed, SchedulingPolicy
from choreo_agents.runtime.step_trace import StepTrace
from choreo_agents.tracing import EventSink

MethodName = Literal["choreo", "baseline", "naive"]
"""From the cache, or from re-encoded text with or without a prefix cache."""


class Memory(Options):
    """Where an engine keeps KV, and how much of it."""

    kv_budget_bytes: int | None = Field(None, ge=1)
    """Upper bound of the KV memory that steps read; None: a share of what is free once the weights are there, half of a
    CPU's and nine tenths of a GPU's, which is then in the log. What nothing reads or pins leaves it when others need
    the room, the least recently used first, and comes back when it is read."""
    host_bytes: int = Field(0, ge=0)
    """Upper bound of the host memory for what left it."""
    disk: Path | None = None
    """A folder for what has no room there either. Without one it is computed again from its lineage."""
    disk_bytes: int = Field(1 << 34, ge=1)
    """Upper bound of this model's files in that folder."""
    persist_dir: Path | None = None
    """A folder for what is to outlive the engine (`engine.kv.persist`): in it are folders for each model and tenant,
    whose files are sealed with the tenant's salt, and which processes may share. What is nowhere else is read from
    there."""
    persist_bytes: int = Field(1 << 34, ge=1)
    """Upper bound of one model's and tenant's files in that folder; the longest unused are removed."""


class Scheduling(Options):
    """What a step of an engine holds."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    max_batched_tokens: int = Field(512, ge=1)
    """Tokens encoded in one forward pass at most; longer prefills are cut into chunks."""
    max_num_seqs: int = Field(256, ge=1)
    """Requests served at once at most."""
    policy: SchedulingPolicy = FirstComeFirstServed()
    """Decides who is admitted, and who encodes how many tokens."""
    graphs: bool = True
    """Whether passes of up to 256 tokens whose sizes recur are captured as CUDA graphs, where the attention backend can
    be captured (`"triton"`). Without, they say the same, launch by launch."""
    ahead: bool = True
    """Whether such passes are begun before the step before them has said its tokens, with those that the device has
    drawn: it does not wait for the host. Rows say the same without. Not where there is a timetable."""
    step_trace: StepTrace | None = None
    """Writes down what each step holds, or, made by `again()`, prescribes it: to compare two runs bit by bit."""

    @field_validator("policy", mode="plain")
    @classmethod
    def _plans(cls, policy: Any) -> Any:
        if isinstance(policy, type) or not callable(getattr(policy, "plan", None)):
            raise ValueError(
                f"a policy is an object with plan(waiting, running, free_tokens, limits), such as "
                f"FirstComeFirstServed(), not {policy!r}"
            )
        return policy


class Settings(Options):
    """See `Engine.load`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    told_as = "Engine.load"

    method: MethodName
    memory: Memory
    scheduling: Scheduling
    backend: BackendName | AttentionBackend
    seed: int
    sink: EventSink

    @field_validator("backend", mode="plain")
    @classmethod
    def _attends(cls, backend: Any) -> Any:
        return require_backend(backend)
