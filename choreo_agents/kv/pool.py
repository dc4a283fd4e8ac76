"""The KV pool of a device, in which the segments of all messages lie."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from choreo_agents.errors import EngineClosedError, KVBudgetError, KVMemoryError
from choreo_agents.kv.blocks import BlockAllocator, Run
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.segment import Holder, Segment
from choreo_agents.kv.tiers import HostKV


class KVPool:
    """Keys and values of every message, `[kv_heads, slots, head_dim]` per layer, within a byte budget.

    A segment gets slots for all tokens that it may ever hold, and returns unused blocks once it is complete; KV is
    never moved within the pool. Not thread-safe.

    Using a segment after it was freed raises `KVMemoryError`; it never reads the slots' new contents.

    Args:
        geometry: The model's KV shape.
        budget_bytes: Upper bound for keys and values together.
        device: Device of the pool.
        block_tokens: Tokens of a block, the unit of allocation.
    """

    def __init__(self, geometry: KVGeometry, budget_bytes: int, device: torch.device, block_tokens: int = 16) -> None:
        blocks = budget_bytes // (geometry.bytes_per_token * block_tokens)
        if blocks < 1:
            least = geometry.bytes_per_token * block_tokens
            raise KVBudgetError(
                f"a KV budget of {budget_bytes!r} bytes is less than a block of {block_tokens} tokens: set at least "
                f"{least}"
            )
        self.geometry = geometry
        self.block_tokens = block_tokens
        shape = (geometry.kv_heads, blocks * block_tokens, geometry.head_dim)
        try:
            self.keys = [torch.empty(shape, dtype=geometry.dtype, device=device) for _ in range(geometry.layers)]
            self.values = [torch.empty(shape, dtype=geometry.dtype, device=device) for _ in range(geometry.layers)]
        except RuntimeError as error:
            raise KVBudgetError(f"{device} has no memory for a KV budget of {budget_bytes!r} bytes: {error}") from error
        self._allocator = BlockAllocator(blocks)
        self._live: set[Segment] = set()
        self._used: Counter[str] = Counter()
        """Tokens that each tenant's segments take."""
        self.idle_tokens = 0
        """Tokens of segments that may be evicted, updated on every change: reading it needs no scan."""
        self.borrowed = 0
        """Number of pins for copies beside steps, whose slots are freed soon."""
        self._leaves: torch.cuda.Stream | None = None
        """Stream of copies to the host."""

    @property
    def total_tokens(self) -> int:
        return self._allocator.blocks * self.block_tokens

    @property
    def free_tokens(self) -> int:
        return self._allocator.free_blocks * self.block_tokens

    @property
    def used_bytes(self) -> int:
        return (self.total_tokens - self.free_tokens) * self.geometry.bytes_per_token

    def used_by(self, tenant: str | None) -> int:
        """Return the bytes that a tenant's segments take; None: all."""
        return self.used_bytes if tenant is None else self._used[tenant] * self.geometry.bytes_per_token

    def rounded(self, tokens: int) -> int:
        """Round tokens up to whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def allocate(self, tokens: int, native_offset: int, tenant: str = "") -> Segment | None:
        """Allocate a tenant's segment for `tokens`, pinned once; return None if the pool is too full."""
        runs = self._allocator.allocate(self.rounded(tokens) // self.block_tokens)
        if runs is None:
            return None
        in_tokens = tuple(Run(run.start * self.block_tokens, run.length * self.block_tokens) for run in runs)
        segment = Segment(in_tokens, native_offset, pins=1, tenant=tenant)
        self._live.add(segment)
        self._used[tenant] += segment.capacity
        return segment

    def complete(self, segment: Segment) -> None:
        """Free the blocks that hold none of the segment's encoded tokens."""
        self._require_live(segment, "completed")
        keep = self.rounded(max(segment.encoded, 1))
        for run in segment.slots(keep, segment.capacity - keep):
            self._allocator.free(self._in_blocks(run))
        self._used[segment.tenant] -= segment.capacity
        segment.hold(tuple(segment.slots(0, keep)))
        self._used[segment.tenant] += segment.capacity
        self.recount(segment)

    def pin(self, segment: Segment) -> None:
        """Add an owner."""
        self._require_live(segment, "pinned")
        segment.pins += 1
        self.recount(segment)

    def set_holder(self, segment: Segment, holder: Holder | None) -> None:
        """Make a segment the KV of a message, whose pin is one of its pins, or of none."""
        segment.holder = holder
        self.recount(segment)

    def recount(self, segment: Segment) -> None:
        """Update the count of idle tokens after a change of a segment, or of its holder's pins."""
        holder, before = segment.holder, segment.idle_tokens
        is_idle = holder is not None and segment.pins == 1 and not holder.pins
        segment.idle_tokens = segment.capacity if is_idle else 0
        self.idle_tokens += segment.idle_tokens - before

    def unpin(self, segment: Segment) -> None:
        """Remove an owner; the last one frees the segment's slots."""
        self._require_live(segment, "given back")
        segment.pins -= 1
        if not segment.pins:
            self._live.remove(segment)
            self._used[segment.tenant] -= segment.capacity
            if not self._used[segment.tenant]:
                del self._used[segment.tenant]
            runs = segment.runs
            segment.hold(())
            for run in runs:
                self._allocator.free(self._in_blocks(run))
        self.recount(segment)

    def borrow(self, segment: Segment) -> None:
        """Pin a segment for a copy beside steps, until `give_back`."""
        self.pin(segment)
        self.borrowed += 1

    def give_back(self, segment: Segment) -> None:
        """Undo one `borrow`."""
        self.borrowed -= 1
        self.unpin(segment)

    def give_up(self) -> None:
        """Release the memory; reading and writing raise from then on."""
        self.keys, self.values = [], []

    def _require_live(self, segment: Segment, action: str) -> None:
        if segment not in self._live:
            raise KVMemoryError(f"a segment that was freed is {action}")

    def _layers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and the values of all layers."""
        sides = self.keys, self.values
        if not all(sides):
            raise EngineClosedError("the engine was closed or restarted, and this memory freed: call again")
        return sides

    def read(self, segment: Segment) -> HostKV:
        """Copy a complete segment's keys and values to the host.

        From a GPU the copy is asynchronous; the segment may be unpinned at once, and steps go on meanwhile.
        """
        self._require_live(segment, "read")
        sides = self._layers()
        where = self.slots(segment, 0, segment.encoded)
        keys, values = (torch.stack([layer[:, where] for layer in side]) for side in sides)
        return HostKV(keys, values) if keys.device.type == "cpu" else self._copy_to_host(keys, values)

    def _copy_to_host(self, keys: Tensor, values: Tensor) -> HostKV:
        """Copy gathered keys and values to pinned memory, on a stream of their own beside the steps."""
        device = keys.device
        if self._leaves is None:
            self._leaves = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._leaves
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copies = []
            for gathered in (keys, values):
                copies.append(torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True))
                copies[-1].copy_(gathered, non_blocking=True)
                gathered.record_stream(stream)  # keeps the allocator from reusing its memory before the copy is done
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return HostKV(*copies, copied=event)

    def write(self, segment: Segment, kv: HostKV) -> None:
        """Fill an empty segment."""
        self._require_live(segment, "written")
        if segment.encoded:
            raise KVMemoryError(f"a segment that holds {segment.encoded} tokens is written again")
        segment.encoded = kv.keys.shape[2]
        for layer in range(self.geometry.layers):
            self.fill(segment, kv, layer)

    def fill(self, segment: Segment, kv: HostKV, layer: int) -> None:
        """Fill one layer of a segment's encoded tokens."""
        at, (keys, values) = 0, self._layers()
        for run in segment.slots(0, segment.encoded):
            for side, part in ((keys, kv.keys), (values, kv.values)):
                side[layer][:, run.start : run.end].copy_(part[layer][:, at : at + run.length])
            at += run.length

    def slots(self, segment: Segment, first: int, count: int) -> Tensor:
        """Return the slots of tokens `first` to `first + count` of a segment, in order, on the pool's device."""
        slots = torch.cat([torch.arange(run.start, run.end) for run in segment.slots(first, count)])
        device = self.keys[0].device
        if device.type != "cuda":
            return slots.to(device)
        return slots.pin_memory().to(device, non_blocking=True)  # a pageable copy would wait for the steps under way

    def check(self) -> None:
        """Assert that live segments and the free list divide the pool between them without overlap."""
        assert 0 <= self.borrowed <= sum(segment.pins for segment in self._live)
        self._allocator.check()
        owned = [self._in_blocks(run) for segment in self._live for run in segment.runs]
        runs = sorted([*owned, *self._allocator.free_runs()], key=lambda run: run.start)
        at = 0
        for run in runs:
            assert run.start == at, f"blocks {min(at, run.start)} to {max(at, run.start)} are lost or owned twice"
            at = run.end
        assert at == self._allocator.blocks, "blocks at the end of the pool are lost"
        used = Counter[str]()
        for segment in self._live:
            used[segment.tenant] += segment.capacity
        assert used == self._used, "room is counted to another tenant, or not at all"
        for segment in self._live:
            assert segment.pins > 0 and 0 <= segment.encoded <= segment.capacity
        idle_tokens = self.idle_tokens
        for segment in self._live:
            self.recount(segment)
        assert idle_tokens == self.idle_tokens == sum(segment.idle_tokens for segment in self._live)

    def live_segments(self) -> int:
        return len(self._live)

    def _in_blocks(self, run: Run) -> Run:
        return Run(run.start // self.block_tokens, run.length // self.block_tokens)
