"""The part of an engine that all tenants share: model, memory, messages and thread."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from choreo_agents.attention.backends import backend_name, why_not_faster
from choreo_agents.engine.adapters import AdapterRegistry, Loaded
from choreo_agents.engine.messages.from_text import TextMethod
from choreo_agents.engine.messages.message import Scope
from choreo_agents.engine.messages.table import ChoreoMethod, MessageTable
from choreo_agents.engine.messages.thread_leases import ThreadLeases
from choreo_agents.engine.settings import Settings
from choreo_agents.errors import DeviceLostError, EngineClosedError
from choreo_agents.kv.cache import HostedEntries, KVCache
from choreo_agents.kv.entry_files import DiskThread, EntryFiles
from choreo_agents.kv.free_memory import pool_bytes
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.store import KVStore
from choreo_agents.kv.store.spill import SpillFile
from choreo_agents.kv.tier_counters import TierCounters
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.executor import Executor
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.runtime.loop import EngineLoop, StepObserver
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import Limits
from choreo_agents.tracing import CacheWriteFailed, FileSkipped, PerTenantCounters, guarded


@dataclass
class Computing:
    """Description of what computes: attention backend, forward pass and CUDA graphs."""

    backend: str = ""
    """Name of the attention backend, ..."""
    backend_why: str = ""
    """... why no faster one is used, if there is a reason, ..."""
    forward: str = ""
    """... and what computes the rest: `"lean"`, on a GPU `"fused"`, or the reason why transformers' modelling code
    does."""
    graphs: int = 0
    """Number of pass sizes that are replayed as CUDA graphs: for all tenants, and visible to the admin only, ..."""
    graphs_why: str = ""
    """... and why none can be, if there is a reason."""
    steps_ahead: int = 0
    """Steps that were started before the tokens of the one before were known. For all tenants likewise."""


Method = ChoreoMethod | TextMethod
"""Strategy for what a call encodes and reuses: its parents' KV, or their text with or without a prefix cache.

   choreo      a decode attends to its parents' own KV, each shown at its place in the view
   baseline    a decode encodes its parents' text again, except the longest prefix that is cached
   naive       a decode encodes all of it again

The last two are the baselines of Prompt Choreography, section 3.1: prefill only stores text, and offsets are ignored.
"""


class RequestLoop(Protocol):
    """Runs requests, on threads of its own. Every method may be called from any thread."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests, which arrive together. Each ends in `ActiveRequests`: finished, failed, cancelled or timed
        out.

        Raises what `require_open` does, and `InvalidRequestError` for a request that cannot be run there.
        """
        ...

    def require_open(self) -> None:
        """Raise `EngineClosedError` after `close`, or the error that ended the loop."""
        ...

    def answers(self) -> bool:
        """Return whether the loop can be started again: with a lost device it cannot."""
        ...

    def wake(self) -> None:
        """Check again what waits for a file. Needs no lock."""
        ...

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of an unfinished request. Under the engine's lock."""
        ...

    def drop_tenant(self, tenant: str) -> None:
        """Fail a tenant's requests with `EngineClosedError`; unless called on the loop's thread, wait until none of
        them runs."""
        ...

    @property
    def is_here(self) -> bool:
        """True if the caller is the thread that runs requests, which must not wait for itself."""
        ...

    def unfinished(self) -> int:
        """Return the number of requests that wait or run."""
        ...

    def requests_of(self, tenant: str) -> list[Request]:
        """Return a tenant's unfinished requests. Call it under the engine's lock."""
        ...

    @property
    def watches(self) -> list[StepObserver]:
        """Observers of every step, if steps run in this process."""
        ...

    def close(self) -> None:
        """Fail unfinished requests with `EngineClosedError`, and end the threads for good."""
        ...


class Execution:
    """Runs the requests of one engine: in this process, on its model's device; a subclass can run them elsewhere.

    The core keeps what does not depend on where requests run: messages, handles, leases, tenants, lineage, adapters. A
    subclass overrides all of these methods but `computing`. It must not refer to the core: an engine that is dropped
    without `close` ends its threads when collected.
    """

    elsewhere: str = ""
    """Name of what computes; empty: this process does."""

    def loop(self, core: EngineCore) -> RequestLoop:
        """Return the loop that runs requests, after starting what it needs: when the engine starts, and restarts. All
        other parts of the core exist by then."""
        settings, scheduling, adapters = core.settings, core.settings.scheduling, core.adapters
        backend = core.model.backend(settings.backend)
        served = core.model.adapter, core.pool, backend, core.counters, adapters.loras, adapters.mappers
        # Not where a run is compared with another bit by bit.
        goes_ahead = scheduling.ahead and scheduling.step_trace is None
        executor = Executor(*served, graphs=scheduling.graphs, ahead=goes_ahead)
        self._model, self._executor = core.model, executor
        limits = Limits(scheduling.max_batched_tokens, scheduling.max_num_seqs)
        planned = scheduling.policy, limits, scheduling.step_trace
        return EngineLoop(executor, core.lock, planned, settings.sink, core.method)

    def begin(self, core: EngineCore) -> None:
        """Finish a start or a restart: set `total_tokens` and `kv_budget_bytes` of the core if its pool does not define
        them. An error ends the start, and the engine with it; a restart is complete by then."""

    def load_adapter(self, folder: Path, name: str, salt: str) -> None:
        """Prepare the adapter in a folder, before calls of the tenant with this salt name it. Raises `AdapterError`."""

    def close_tenant(self, tenant: str, salt: str) -> None:
        """Forget a tenant, whose messages were dropped. Under the lock."""

    def release(self, message_id: str) -> None:
        """Forget a message that has no KV in the cache any more. Under the lock."""

    def holds(self, message_id: str) -> bool:
        """Return whether another engine holds a message for this one. Under the lock."""
        return False

    def bytes_by_tier(self, cache: KVCache, tenant: str | None) -> dict[str, Any]:
        """Return the bytes in each tier (see `KVCache`). Under the lock."""
        return cache.bytes_by_tier(tenant)

    def require_ready(self) -> None:
        """Raise `EngineLostError` if what runs the requests does not answer now. May block for seconds."""

    def computing(self) -> Computing:
        """Describe what computes."""
        if self.elsewhere:
            return Computing(self.elsewhere, forward=self.elsewhere)
        executor, backend = self._executor, self._executor.backend
        passes, ahead = executor.passes, executor.steps_ahead
        attends = backend_name(backend), why_not_faster(backend)
        return Computing(*attends, self._model.computed_with(backend), passes.captured, passes.why, ahead)


class EngineCore:
    """Shared core of an engine, behind its tenants. Every public method may be called from any thread.

    Args:
        model: Model to serve.
        settings: Settings of the engine.
        adapter: Default adapter of all tenants' calls.
        execution: Runs the requests; None: this process does.

    Raises:
        What `Execution.begin` does: the engine is closed then.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: Settings,
        adapter: Loaded | None = None,
        execution: Execution | None = None,
    ) -> None:
        self.model, self.settings = model, settings
        self.execution = execution or Execution()
        self.adapters = AdapterRegistry(model.adapter)
        if adapter is not None:
            self.adapters.add_default(adapter)
        self.secret = secrets.token_bytes(32)
        """Secret of this engine: source of keys that must not outlive it."""
        self.lock, self.next_number = EngineLock(), itertools.count().__next__
        """Returns the number of the next request."""
        self.counters, self.tier_counters = PerTenantCounters(Counters), PerTenantCounters(TierCounters)
        self.kept: dict[str, KVStore] = {}
        """KV stores that outlive the engine, by tenant."""
        self.held_bytes = 0
        """Bytes of KV that memory must keep until it is written."""
        self._skipped = skipped = deque[FileSkipped]()
        """Files that could not be used, and were not reported yet."""
        self.skipped_file = lambda path, why: skipped.append(FileSkipped(time.perf_counter(), str(path), why))
        """Callback that records such a file for the cache to report. Needs no lock, and does not keep the engine
        alive."""
        self._lifetime = threading.RLock()
        """Held while the engine is closed or restarted, by a thread that does not hold `lock`."""
        self._closed, self._emit = False, guarded(settings.sink)
        served, budget = model.adapter, settings.memory.kv_budget_bytes
        self._pool_bytes = budget or pool_bytes(served.geometry, served.device, served.max_positions)
        self._start(None)
        self.thread_leases = ThreadLeases(self.table, self.lock)
        self.kv_budget_bytes = self._pool_bytes
        """Bytes of KV that all messages can use together."""
        self.total_tokens = self.pool.total_tokens
        """Tokens of KV that one request can use."""
        try:
            self.execution.begin(self)
        except BaseException:
            self.close()
            raise

    def _start(self, table: MessageTable | None) -> None:
        """Set up memory and thread; a table from before a restart keeps its messages, whose KV is computed when
        read."""
        adapter, memory = self.model.adapter, self.settings.memory
        self.pool = KVPool(adapter.geometry, self._pool_bytes, adapter.device)
        spill = None
        if memory.disk is not None:
            spill = SpillFile(memory.disk, adapter.geometry, memory.disk_bytes, self.skipped_file)
        disk = DiskThread(spill)
        files = EntryFiles(disk, self.kept, self.tier_counters, self._skipped, self._emit)
        self.cache = KVCache(self.pool, HostedEntries(memory.host_bytes), files, self.tier_counters)
        self.cache.on_drop = self.execution.release
        if table is not None:
            table.move_to(self.cache)
        self.table = table or MessageTable(self.cache, adapter.fingerprint, self.next_number)
        self.method: Method = ChoreoMethod(self.table)
        """Encodes requests, and frees memory for them."""
        if self.settings.method != "choreo":
            self.method = TextMethod(self.pool, prefix_cache=self.settings.method == "baseline")
        self.loop = self.execution.loop(self)
        files.wake = self.loop.wake
        # Ends the threads when the engine is dropped without being closed, and before the interpreter exits.
        self._end = weakref.finalize(self, _close, self.lock, self.loop, disk)
        self._disk = disk

    def close_scope(self, scope: Scope) -> None:
        """Drop all leases that a scope counts; calls still running in it will take none."""
        if self.lock.is_the_parents:
            return  # a block entered before this process was forked ends in the parent
        with self.lock:
            self.table.close(scope)
            self.thread_leases.close_inside(scope)

    def close(self) -> None:
        """Fail unfinished requests, and end the engine's threads for good. In a forked process it does nothing."""
        if self.lock.is_the_parents:
            return
        with self._lifetime:
            self._closed = True
            _close(self.lock, self.loop, self._disk)

    def unwritten_file(self, path: Path, why: str) -> None:
        """Emit an event for files that cannot be written."""
        with self.lock:
            self._emit(CacheWriteFailed(time.perf_counter(), str(path), why))

    def restart(self) -> None:
        """Fail unfinished requests, and start again with empty memory: messages keep their lineage.

        Raises:
            EngineClosedError: It was closed. DeviceLostError: Its device computes no more. What `Execution.begin` does.
        """
        self.lock.require_own()
        with self._lifetime:
            if self._closed:
                raise EngineClosedError("the engine is closed: load a new one")
            if not self.loop.answers():
                raise DeviceLostError("the device has stopped computing: load the engine again, in a new process")
            self._end.detach()
            _close(self.lock, self.loop, self._disk)
            with self.lock:
                # The old memory must be freed before the new one is allocated: both may not fit.
                self.pool.give_up()
                self._start(self.table)
        self.execution.begin(self)


def _close(lock: EngineLock, loop: RequestLoop, disk: DiskThread) -> None:
    if lock.is_the_parents:
        return  # threads and files are the parent's
    loop.close()
    with lock:
        disk.end()
    disk.close()
