"""Settings of an engine: each group is one frozen object."""

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
"""Method of reading messages: from their KV, or from their text with or without a prefix cache."""


class Memory(Options):
    """Tiers and budgets of an engine's KV memory."""

    kv_budget_bytes: int | None = Field(None, ge=1)
    """Most bytes of KV that steps can read; None: a share of what is free once the weights are loaded, half of a CPU's
    and nine tenths of a GPU's, which is then logged. When memory is short, KV that nothing reads or pins is evicted,
    least recently used first, and comes back when it is read."""
    host_bytes: int = Field(0, ge=0)
    """Most bytes of host memory for evicted KV."""
    disk: Path | None = None
    """Folder of an unnamed file for KV that does not fit there either. Without one it is computed again from its
    lineage."""
    disk_bytes: int = Field(1 << 34, ge=1)
    """Most bytes of this engine's file."""
    persist_dir: Path | None = None
    """Folder for KV that outlives the engine (`engine.kv.persist`), with a sub-folder for each model and tenant; files
    are signed with the tenant's salt, and processes may share them. KV that is in no other tier is read from there."""
    persist_bytes: int = Field(1 << 34, ge=1)
    """Most bytes of one model's and tenant's files in that folder; the longest unused are removed."""


class Scheduling(Options):
    """Limits and policy of the steps of an engine."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    max_batched_tokens: int = Field(512, ge=1)
    """Most tokens encoded in one forward pass; longer prefills are cut into chunks."""
    max_num_seqs: int = Field(256, ge=1)
    """Most requests served at once."""
    policy: SchedulingPolicy = FirstComeFirstServed()
    """Decides which requests are admitted, and how many tokens each encodes."""
    graphs: bool = True
    """Whether passes of up to 256 tokens whose sizes recur are captured as CUDA graphs, where the attention backend
    supports it (`"triton"`). Results are the same without."""
    ahead: bool = True
    """Whether such passes start before the tokens of the step before are known to the host, with those that the device
    has drawn. Results are the same without. Ignored with a step trace."""
    step_trace: StepTrace | None = None
    """Records what each step holds or, made by `replay()`, prescribes it: to compare two runs bit by bit."""

    @field_validator("policy", mode="plain")
    @classmethod
    def _plans(cls, policy: Any) -> Any:
        if isinstance(policy, type) or not callable(getattr(policy, "plan", None)):
            raise ValueError(
                "a scheduling policy must have plan(waiting, running, free_tokens, limits), such as "
                f"FirstComeFirstServed(), not {policy!r}"
            )
        return policy


class Settings(Options):
    """All settings of an engine: see `Engine.load`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    error_name = "Engine.load"

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
