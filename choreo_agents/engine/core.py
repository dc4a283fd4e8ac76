"""What all tenants of an engine share: model, memory, messages, thread."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from choreo_agents.engine.adapters import AdapterRegistry, Loaded
from choreo_agents.engine.messages.from_cache import ChoreoMethod, FromCache
from choreo_agents.engine.messages.from_text import TextMethod
from choreo_agents.engine.messages.holdings import Holdings
from choreo_agents.engine.messages.method import Method
from choreo_agents.engine.messages.naming import Naming
from choreo_agents.engine.messages.recompute import Recomputer
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.engine.rate_limit import RateLimiter
from choreo_agents.engine.settings import Settings
from choreo_agents.engine.stock.computing import Computing, computing
from choreo_agents.errors import DeviceLostError, EngineClosedError
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.entry_files import EntryFiles
from choreo_agents.kv.free_memory import pool_bytes
from choreo_agents.kv.hosted import HostedEntries
from choreo_agents.kv.movements import Movements
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.store import KVStore
from choreo_agents.kv.store.places import EnginePlace
from choreo_agents.kv.store.thread import DiskThread
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.executor import Executor
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.runtime.loop import EngineLoop
from choreo_agents.runtime.planner import Planner
from choreo_agents.runtime.scheduler import Limits
from choreo_agents.tracing import FileSkipped, FileUnwritten, Ledger, guarded


class EngineCore:
    """The engine behind its sync and async faces. Every public method may be called from any thread.

    Args:
        model: Served by it.
        settings: How.
        adapter: What calls of all tenants have unless they name another.
    """

    computing: Callable[[], Computing] = staticmethod(Computing)
    """What computes steps, in words; elsewhere, unless it is said."""

    def __init__(self, model: LoadedModel, settings: Settings, adapter: Loaded | None = None) -> None:
        self.model, self.settings = model, settings
        self.adapters = AdapterRegistry(model.adapter)
        if adapter is not None:
            self.adapters.add_default(adapter)
        self.secret = secrets.token_bytes(32)
        """Of this engine alone: keys of what must not outlive it are made of it."""
        self.lock, self._numbers = EngineLock(), itertools.count()
        self.counters, self.movements = Ledger(Counters), Ledger(Movements)
        self.kept: dict[str, KVStore] = {}
        """What outlives the engine, by tenant."""
        self.held_bytes = 0
        """Of messages that memory does not lose because they are still to be written."""
        self._skipped: deque[FileSkipped] = deque()
        """Files that could not be used, and of which nobody was told yet."""
        self.skipped_file = partial(_note, self._skipped)
        """Notes one of them, of which the cache tells. Needs no lock, and does not keep the engine alive."""
        self.on_restart: list[weakref.WeakMethod[Callable[[], None]]] = []
        """Called between the end of what was under way and the new start."""
        self._limiters: list[RateLimiter] = []
        self._lifetime = threading.RLock()
        """Held while the engine is closed or restarted, by whom does not hold `lock`."""
        self._closed, self._emit = False, guarded(settings.sink)
        served, budget = model.adapter, settings.memory.kv_budget_bytes
        self.kv_budget_bytes = budget or pool_bytes(served.geometry, served.device, served.max_positions)
        self._start(None)
        self.holdings = Holdings(self.table)

    def _start(self, table: MessageTable | None) -> None:
        """Set up memory and thread; a table of before keeps its messages, whose KV is computed again when read."""
        adapter, memory = self.model.adapter, self.settings.memory
        self.pool = KVPool(adapter.geometry, self.kv_budget_bytes, adapter.device)
        disk = None
        if memory.disk is not None or memory.kept is not None:
            disk = DiskThread(None if memory.disk is None else self._disk_store)
        files = EntryFiles(disk, self.kept, self.movements, self._skipped, self._emit)
        self.cache = self._cache(HostedEntries(memory.host_bytes), files)
        made = MessageTable(self.cache, adapter.fingerprint) if table is None else table
        self.table = made.enter_cache(self.cache)
        self.recomputer = Recomputer(self.table, self._numbers.__next__, FromCache)
        self.method = self._method()
        self.loop = self._loop()
        files.wake = self.loop.wake
        # Ends the threads when the engine is dropped without being closed, and before the interpreter exits.
        self._end = weakref.finalize(self, _close, self.lock, self.loop, disk, self._limiters)
        self._disk = disk

    def _cache(self, host: HostedEntries, files: EntryFiles) -> KVCache:
        return KVCache(self.pool, host, files, self.movements)

    def _loop(self) -> EngineLoop:
        settings, scheduling, adapters = self.settings, self.settings.scheduling, self.adapters
        backend = self.model.backend(settings.backend)
        served = self.model.adapter, self.pool, backend, self.counters, adapters.loras, adapters.mappers
        executor = Executor(*served, graphs=scheduling.graphs, ahead=scheduling.goes_ahead)
        self.computing = partial(computing, self.model, executor)
        planner = Planner(scheduling.policy, Limits(scheduling.step_tokens, scheduling.rows), scheduling.timetable)
        return EngineLoop(executor, self.lock, planner, settings.sink, self.method)

    def _disk_store(self, removed: Callable[[str], None]) -> KVStore:
        """What leaves the host goes here; nobody else has the key, and it is gone with the engine."""
        adapter, memory = self.model.adapter, self.settings.memory
        assert memory.disk is not None
        place, seal = EnginePlace(memory.disk, adapter.fingerprint), secrets.token_bytes(32)
        return KVStore(place, adapter.geometry, seal, memory.disk_bytes, self.skipped_file, removed)

    @property
    def total_tokens(self) -> int:
        """That its memory has room for."""
        return self.pool.total_tokens

    @property
    def keeps_kv(self) -> bool:
        """Whether messages own KV; needs no lock."""
        return self.settings.method == "choreo"

    def _method(self) -> Method:
        name = self.settings.method
        if name == "choreo":
            return ChoreoMethod(self.recomputer)
        return TextMethod(self.pool, prefix_cache=name == "baseline")

    def load_adapter(self, loaded: Loaded, name: str | None, naming: Naming) -> str:
        """Let a tenant's calls name an adapter; the name that it has then."""
        with self.lock:
            return self.adapters.add(loaded, name, naming.tenant)

    def count_found(self, tokens: int, tenant: str) -> None:
        """Count the prompt of a tenant's prefill that found its message encoded, or on its way for another call."""
        self.counters.add(tenant, "tokens_reused", tokens)

    def next_number(self) -> int:
        """Of the next request."""
        return next(self._numbers)

    def limiter(self, starts_per_s: float) -> RateLimiter:
        """A new rate limiter, closed with the engine."""
        limiter = RateLimiter(starts_per_s)
        self._limiters.append(limiter)
        return limiter

    def close_limiter(self, limiter: RateLimiter) -> None:
        """Close one, and forget it."""
        self._limiters.remove(limiter)
        limiter.close()

    def close_scope(self, scope: Scope) -> None:
        """Drop all leases that a scope counts; calls still under way in it will take none."""
        if self.lock.is_the_parents:
            return  # a block that was begun before this process was forked ends in the parent
        with self.lock:
            scope.closed = True
            self.table.close(scope)
            self.holdings.close_inside(scope)

    def close(self) -> None:
        """Fail what is unfinished, and end the engine's threads; for good. A forked process leaves its parent's."""
        if self.lock.is_the_parents:
            return
        with self._lifetime:
            self._closed = True
            _close(self.lock, self.loop, self._disk, self._limiters)

    def tell_skipped_file(self, path: Path, why: str) -> None:
        """Tell the sink of a file that could not be used."""
        with self.lock:
            self._emit(FileSkipped(time.perf_counter(), str(path), why))

    def unwritten_file(self, path: Path, why: str) -> None:
        """Tell the sink of files that cannot be written."""
        with self.lock:
            self._emit(FileUnwritten(time.perf_counter(), str(path), why))

    def restart(self) -> None:
        """Fail what is unfinished, and start again with empty memory: messages are kept by their lineage.

        Raises:
            EngineClosedError: It was closed. DeviceLostError: Its device computes no more.
        """
        self.lock.require_own()
        with self._lifetime:
            if self._closed:
                raise EngineClosedError("the engine is closed: load a new one")
            if not self.loop.answers():
                raise DeviceLostError("the device computes no more: load the engine again, in a new process")
            self._end.detach()
            _close(self.lock, self.loop, self._disk, [])
            with self.lock:
                for reference in self.on_restart:
                    if (forget := reference()) is not None:
                        forget()
                table = self.table
                table.leave_cache()
                # The old memory must be gone before there is a new one: both may not fit.
                self.pool.give_up()
                self._start(table)


def _note(skipped: deque[FileSkipped], path: Path, why: str) -> None:
    skipped.append(FileSkipped(time.perf_counter(), str(path), why))


def _close(lock: EngineLock, loop: EngineLoop, disk: DiskThread | None, limiters: Sequence[RateLimiter]) -> None:
    if lock.is_the_parents:
        return  # threads and files are the parent's
    for limiter in list(limiters):
        limiter.close()
    loop.close()
    if disk is not None:
        with lock:
            disk.end()
        disk.close()
