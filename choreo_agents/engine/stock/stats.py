"""What a tenant of an engine, or all of them, hold and have done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from choreo_agents.tracing import table_html


@dataclass(frozen=True)
class EngineStats:
    """A snapshot: totals since the engine was loaded or the tenancy began, and what there is now.

    A tenant's are its own: steps that held a row of its, their rows that were its, and what these read. Others
    show in `evicted` and `recomputed` alone: one budget is kept for all.
    """

    tokens_encoded: int
    """Tokens that went through the model for the first time."""
    tokens_reused: int
    """Tokens that calls attended to, or asked to prefill, and found encoded; to prefill: or lost since."""
    tokens_recomputed: int
    """Tokens that went through the model again, since memory had lost them."""
    steps: int
    rows: int
    """Requests served, summed over steps."""
    decode_steps: int
    """Steps that sampled at least one token."""
    decode_rows: int
    """Requests served in those steps."""
    decode_unfinished: int
    """Requests submitted and unfinished at the start of those steps, summed over them."""
    kv_bytes_read: int
    """KV memory that steps have read: a segment once for all rows of a step that see it, ..."""
    kv_bytes_read_alone: int
    """... and what they would have read, had every row read its own view, as an engine without sharing does."""
    tokens_mapped: int
    """Tokens whose KV a cache mapper made of other KV, for the first time; no pass encoded them."""
    finished: int
    cancelled: int
    failed: int

    unfinished: int
    """Requests waiting or running now."""
    messages: int
    """Leased messages now."""
    leases: int
    kv_bytes: int
    """KV memory in use now, in the pool, ..."""
    kv_budget_bytes: int
    """Of the engine: all tenants share it."""
    backend: str = ""
    """What attends, ..."""
    backend_why: str = ""
    """... why nothing faster does, if something stands in the way, ..."""
    forward: str = ""
    """... and what computes the rest: `"lean"`, on a GPU `"fused"`, or why the modelling code of transformers does."""
    graphs: int = 0
    """Sizes of passes that are replayed as CUDA graphs now: of all tenants, and told to their owner alone, ..."""
    graphs_why: str = ""
    """... and why none can be, if something stands in the way."""
    steps_ahead: int = 0
    """Steps that were begun before the one before them had said its tokens. Of all tenants likewise."""
    host_bytes: int = 0
    """... on the host, ..."""
    disk_bytes: int = 0
    """... and on disk."""
    evicted: int = 0
    """Messages that left the pool, ..."""
    restored_from_host: int = 0
    """... came back from the host, ..."""
    restored_from_disk: int = 0
    """... came back from the disk, ..."""
    lost: int = 0
    """... left the last tier, ..."""
    recomputed: int = 0
    """... and were computed again from their lineage."""
    tokens_of_other_models: int = 0
    """Of those encoded: in words that another model had said, encoded here for its readers."""
    adopted: int = 0
    """Messages whose KV was encoded elsewhere and taken in (see `KVTransfer.adopt`)."""
    sent_bytes: int = 0
    """Of KV that was packed for other engines, ..."""
    received_bytes: int = 0
    """... and that came from such."""
    threads: int = 0
    """Threads of graphs, and runs that no checkpointer keeps, that lease something or are under way now."""

    @property
    def rows_per_step(self) -> float:
        """Mean requests served by one forward pass."""
        return self.rows / self.steps if self.steps else 0.0

    @property
    def rows_per_decode_step(self) -> float:
        return self.decode_rows / self.decode_steps if self.decode_steps else 0.0

    @property
    def unfinished_per_decode_step(self) -> float:
        """Mean requests that were submitted and unfinished: what `rows_per_decode_step` could be at most."""
        return self.decode_unfinished / self.decode_steps if self.decode_steps else 0.0

    def __str__(self) -> str:
        return "\n".join(f"{name:<24} {value}" for name, value in self._told())

    def _repr_html_(self) -> str:
        return table_html("what the engine has done, and holds", ("", ""), self._told())

    def _told(self) -> list[tuple[str, Any]]:
        return [(name.replace("_", " "), value) for name, value in asdict(self).items() if value not in (0, "")]
