"""The engine: prefill and decode over one global KV cache, sync, async and streaming."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from choreo_agents.arguments import refuses_unknown
from choreo_agents.attention.backends import AttentionBackend, BackendName
from choreo_agents.engine.adapters import read_loaded
from choreo_agents.engine.branches import Branches
from choreo_agents.engine.calling import StreamedItem, Tenant, plan_call, require_one
from choreo_agents.engine.calls import Content, Decode, Prefill
from choreo_agents.engine.core import EngineCore, Execution
from choreo_agents.engine.inspect import Inspection
from choreo_agents.engine.introspection import (
    EngineStats,
    LeasedMemory,
    MemoryMap,
    check_engine,
    leased_memory,
    memory_map_of,
    stats_of,
)
from choreo_agents.engine.lineage import LineageExchange
from choreo_agents.engine.messages.message import Scope, Usage
from choreo_agents.engine.messages.thread_leases import Threads
from choreo_agents.engine.recording.recorder import Recordings
from choreo_agents.engine.settings import Memory, MethodName, Scheduling, Settings
from choreo_agents.engine.transfer import KVTransfer
from choreo_agents.errors import EngineClosedError, InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, GenerationConfigUse, LoadedModel, load_model
from choreo_agents.runtime.lock import compute_after_fork
from choreo_agents.sampling import SampledToken
from choreo_agents.tracing import EventSink, discard

E = TypeVar("E", bound="Engine")
P = ParamSpec("P")
One_co = TypeVar("One_co", covariant=True)
Many_co = TypeVar("Many_co", covariant=True)
_EMPTY_BYTES = 1 << 20
"""Bytes of the KV memory of an engine that computes nothing itself."""


class _Taking(Protocol[P, One_co, Many_co]):
    """Method that takes the fields of one call, or a list of calls."""

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> One_co: ...

    @overload
    def __call__(self, calls: Sequence[Prefill] | Sequence[Decode], /) -> Many_co: ...


def _takes(kind: Callable[P, object]) -> Callable[[Any], _Taking[P, MessageHandle, list[MessageHandle]]]:
    """Give a method the parameters of a kind of call, for type checkers."""
    return lambda method: method


def _atakes(
    kind: Callable[P, object],
) -> Callable[[Any], _Taking[P, Coroutine[Any, Any, MessageHandle], Coroutine[Any, Any, list[MessageHandle]]]]:
    """Do what `_takes` does for a coroutine method."""
    return lambda method: method


class Engine:
    """An in-process engine over a Hugging Face model, as one tenant uses it.

    `prefill` and `decode` encode a message with attention to any earlier messages, at the positions that the call
    gives. Calls from any thread and event loop share the model's steps. Each handle comes with a lease, which `release`
    drops.
    """

    def __init__(
        self, owner: EngineAdmin, salt: str, calls_per_second: float | None = None, *, is_owners: bool = False
    ) -> None:
        self._core, self._tenant = owner.core, owner.open(salt, calls_per_second)
        self._owner, self.admin = owner, owner if is_owners else None
        """Operations for all tenants; None for an engine that `tenant` has returned."""
        self.branches = Branches(self._tenant)
        """Maps and merges the answers of parallel calls."""
        self.kv = KVTransfer(self._tenant)
        """Reads, imports, pins and moves keys and values."""
        self.inspect = Inspection(self._tenant)
        self.threads = Threads(self._core.thread_leases, self._tenant.name, self._tenant.scopes)
        """Lineage of messages, and the leases that threads of graphs hold between calls."""
        self.record, self.lineage = Recordings(self._tenant), LineageExchange(self._tenant)
        """Records runs of graphs, and exchanges messages' lineage with a store."""

    def __repr__(self) -> str:
        return f"Engine({self.model.name})"

    @classmethod
    @refuses_unknown()
    def load(
        cls,
        model: str | Path | LoadedModel = "embedded",
        *,
        method: MethodName = "choreo",
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        prepacked: bool | None = None,
        generation_config: GenerationConfigUse | None = None,
        memory: Memory | None = None,
        scheduling: Scheduling | None = None,
        backend: BackendName | AttentionBackend = "auto",
        seed: int = 0,
        salt: str = "",
        sink: EventSink = discard,
        adapter: str | Path | None = None,
        chat: Mapping[str, Any] | None = None,
    ) -> Engine:
        """Load a model and start an engine over it.

        Args:
            model: `"embedded"`, a folder in Hugging Face's layout, a hub name, or a model loaded before.
            method: From the cache, or from re-encoded text (Prompt Choreography, section 3.1).
            device: Where model and KV are; by default `"auto"`: the GPU if there is one. `dtype`: of both, and
                `prepacked`: whether weights are laid out for a CPU; by default as `load_model` chooses.
            generation_config: Whether calls sample with the checkpoint's defaults: `"auto"`, the default, or `"off"`;
                `engine.model.sampling_defaults` has them.
            memory: Where KV is kept, and how much. `scheduling`: what a step holds.
            backend: Attention backend: by default the fastest available, `"reference"` is the slow one to compare with;
                or an object of your own. The model is checked with it.
            seed: Source of the seeds of calls that have none.
            salt: The tenant's secret: handle ids depend on it. Without one they are unique to this engine: messages
                that another process must recognize need one.
            sink: Receives trace events on the engine's thread.
            adapter: Default adapter of all tenants' calls; as for `load_adapter`.
            chat: Variables of the model's chat template, such as `{"enable_thinking": True}`, and `date`.

        Raises:
            AdapterError: The adapter is another model's, or its files are damaged.
            UnsupportedModelError: The model cannot be served exactly. ValueError: A setting is out of range.
        """
        compute_after_fork()
        chosen = {"method": method, "memory": memory or Memory(), "scheduling": scheduling or Scheduling()}
        settings = Settings(**chosen, backend=backend, seed=seed, sink=sink)
        options = {"device": device, "dtype": dtype, "prepacked": prepacked, "chat": chat}
        loaded = _load_model(model, backend, options | {"generation_config": generation_config})
        own = None if adapter is None else read_loaded(loaded.adapter, adapter)
        return cls(EngineAdmin(EngineCore(loaded, settings, own)), salt, is_owners=True)

    @_takes(Prefill)
    def prefill(self, content: Any, *args: Any, **options: Any) -> Any:
        """Encode given tokens as a message (Prompt Choreography, section 2.3).

        Arguments are the fields of `Prefill`, in its order or by name; or a list of `Prefill`, which runs as one batch
        and returns a list.

        Returns:
            A leased handle. The same content encoded again at the same place costs nothing.

        Raises:
            InvalidRequestError: Empty content, no token, wrong offsets; `ContextLengthError` and `KVBudgetError` if it
                can never fit. Nothing is encoded then.
            HandleError: A parent is unknown, released, or another model's.
            CapacityError: Pinned messages leave no room now. RequestTimeoutError: It took longer than `timeout_s`.
        """
        return self._tenant.run(plan_call(Prefill, content, args, options))

    @_atakes(Prefill)
    async def aprefill(self, content: Any, *args: Any, **options: Any) -> Any:
        """See `prefill`. Cancelling the awaiting task stops the request and frees its memory."""
        return await self._tenant.arun(plan_call(Prefill, content, args, options))

    @_takes(Decode)
    def decode(self, header: Any, *args: Any, **options: Any) -> Any:
        """Generate a message that starts with `header` (Prompt Choreography, section 2.3).

        Arguments are the fields of `Decode`, or a list of `Decode`, as for `prefill`.

        Returns:
            A leased handle; `text` and `tokens` give what was generated. A batch gives as many for each call as its
            sampling's `n`, one after the other. Raises what `prefill` raises.
        """
        return self._tenant.run(plan_call(Decode, header, args, options))

    @_atakes(Decode)
    async def adecode(self, header: Any, *args: Any, **options: Any) -> Any:
        """See `decode`. Cancelling the awaiting task stops the request and frees its memory."""
        return await self._tenant.arun(plan_call(Decode, header, args, options))

    def stream(self, header: Content, *args: Any, tokens: bool = True, **options: Any) -> Generator[StreamedItem]:
        """Decode one message, yielding each token as it comes and the handle last. Arguments as for `decode`.

        Leaving the loop early cancels the decode. With `tokens=False` the handle alone comes.
        """
        return self._tenant.stream(require_one(Decode(header, *args, **options)), tokens=tokens)

    def astream(self, header: Content, *args: Any, tokens: bool = True, **options: Any) -> AsyncGenerator[StreamedItem]:
        """The async form of `stream`."""
        return self._tenant.astream(require_one(Decode(header, *args, **options)), tokens=tokens)

    def text(self, handle: MessageHandle, *, special: bool = True) -> str:
        """Return a message's text, with or without special tokens."""
        return self.model.decode(self.tokens(handle), special=special)

    def tokens(self, handle: MessageHandle) -> list[int]:
        """Return a message's token ids."""
        return list(self._tenant.find(handle).tokens)

    def usage(self, handle: MessageHandle) -> Usage:
        """Return the usage of the call that made a message."""
        return self._tenant.find(handle).usage

    def logprobs(self, handle: MessageHandle) -> tuple[SampledToken, ...]:
        """Return a message's sampled tokens, with the log-probabilities that its call asked for."""
        return self._tenant.find(handle).chosen or ()

    def release(self, handle: MessageHandle, *, keep_last: bool = False) -> None:
        """Drop one lease; the last frees the message's KV and invalidates the handle, unless `keep_last` prevents
        it."""
        self._tenant.release(handle, self._tenant.scope(), keep_last=keep_last)

    def scope(self) -> AbstractContextManager[Scope]:
        """Drop, at the end of the block, every lease that was taken inside and not yet released.

        `kv.offload` accepts the scope that the block gets.
        """
        return self._tenant.scoped()

    def load_adapter(self, folder: str | Path, name: str | None = None) -> str:
        """Load an adapter, a cache mapper or both for this tenant's calls that name it.

        Args:
            folder: Folder that a training run of this package, or peft, has written.
            name: Name for calls, which is returned; by default the folder's name.

        Raises:
            AdapterError: It is another model's, its files are damaged, or another has that name.
        """
        core, tenant = self._core, self._tenant
        tenant.require_tenancy()
        loaded = read_loaded(core.model.adapter, folder)
        with core.lock:
            tenant.require_tenancy()  # reading takes a while: the tenancy may have ended
            name = core.adapters.require_free(loaded, name, tenant.name)
        core.execution.load_adapter(loaded.folder, name, tenant.message_ids.salt)
        with core.lock:
            return core.adapters.add(loaded, name, tenant.name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that this tenant's calls can use: its own, and the engine's default."""
        with self._core.lock:
            self._tenant.require_tenancy()
            return tuple(self._core.adapters.folders(self._tenant.name))

    def tenant(self, salt: str, *, calls_per_second: float | None = None) -> Engine:
        """Return the same engine for another tenant: one model, one pool, shared steps, but no shared messages.

        Handles of one tenant are unknown to another, and what one has encoded is never found by another, in any tier.
        Scopes, adapters, `stats` and `kv.memory_map` are its own.

        Args:
            salt: The tenant's secret.
            calls_per_second: Most of its calls that may start in a second from now on; others wait in order of arrival.
                Each answer of a call with several (`Sampling.n`) is a start. None: unchanged, at first no limit;
                `math.inf` removes the limit.

        Raises:
            InvalidRequestError: `calls_per_second` is not a number above 0.
        """
        return Engine(self._owner, salt, calls_per_second)

    @property
    def model(self) -> LoadedModel:
        return self._core.model

    @property
    def chat(self) -> ChatFormat:
        """The model's chat format."""
        return self._core.model.chat

    @property
    def seed(self) -> int:
        return self._core.settings.seed

    @property
    def method(self) -> MethodName:
        return self._core.settings.method

    def stats(self) -> EngineStats:
        """Return this tenant's totals and current usage, without those of others: see `EngineAdmin.stats`."""
        return stats_of(self._core, self._tenant.name)

    def check(self) -> None:
        """Assert all invariants of memory and bookkeeping."""
        check_engine(self._core)

    def close(self) -> None:
        """End this tenancy; on the engine that `load` returned, end the engine with all tenants.

        KV that is to be kept is written first. Unfinished calls fail with `EngineClosedError`, as do later ones. The
        tenant's leases end, and what only it holds is dropped; others go on, and `tenant` begins a new tenancy.
        """
        if self.admin is None:
            self._owner.close_tenant(self._tenant)
        else:
            self.admin.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineAdmin:
    """Operations on all tenants of an engine: `engine.admin`. May be used from any thread.

    Args:
        core: Core that serves them.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._open: dict[str, Tenant] = {}
        """Open tenants by salt."""
        self._closed = core.lock.condition()

    def open(self, salt: str, calls_per_second: float | None = None) -> Tenant:
        """Return the tenant with this salt; for `calls_per_second` see `Engine.tenant`.

        If it is being closed, wait for that; the new tenancy starts empty.

        Raises:
            InvalidRequestError: The rate is not above 0.
            EngineClosedError: It is being closed, which waits for the engine's thread, and this is that thread.
        """
        if not isinstance(salt, str):
            raise InvalidRequestError(f"a salt must be a string, not {salt!r}")
        # Folders are created and read without the lock.
        created = None if salt in self._open else Tenant(self.core, salt)
        with self.core.lock:
            while (tenant := self._open.get(salt)) is not None and tenant.closing:
                if self.core.loop.is_here:
                    raise EngineClosedError("this tenant is being closed: open it again after that")
                self._closed.wait()
            tenant = tenant or created or Tenant(self.core, salt)
            if calls_per_second is not None:
                tenant.limiter.set_rate(calls_per_second)
            if tenant.persistent_kv is not None and tenant.persistent_kv.store is not None:
                self.core.kept[tenant.name] = tenant.persistent_kv.store
            self._open[salt] = tenant
            return tenant

    def close_tenant(self, tenant: Tenant) -> None:
        """End a tenancy: see `Engine.close`."""
        with self.core.lock:
            if tenant.closing:
                if not self.core.loop.is_here:
                    self._closed.wait_for(lambda: tenant not in self._open.values())
                return
            tenant.closing = True
        try:
            tenant.close()  # waits for the engine's thread, which may be opening another tenant
        finally:
            with self.core.lock:
                self._open = {salt: opened for salt, opened in self._open.items() if opened is not tenant}
                self._closed.notify_all()

    def tenants(self) -> Mapping[str, LeasedMemory]:
        """Return the memory that each open tenant leases, by a name that does not reveal its salt and that its folders
        have."""
        with self.core.lock:
            self.core.cache.files.arrive_all()
            leased = leased_memory(self.core, self.core.table.messages(), lambda message: message.tenant)
            return {tenant.name: leased.get(tenant.name, LeasedMemory()) for tenant in self._open.values()}

    def stats(self) -> EngineStats:
        """Return totals and current usage, for all tenants together."""
        return stats_of(self.core)

    def memory_map(self) -> MemoryMap:
        """Return how much is in each tier, and which authors keep it there, for all tenants together."""
        return memory_map_of(self.core)

    def require_ready(self) -> None:
        """Raise the error that a call would meet now, for a server's readiness probe. May block for seconds.

        Raises:
            EngineClosedError: The engine was closed. DeviceLostError: Its device computes no more.
            EngineLostError: None of the remote engines answers.
        """
        self.core.loop.require_open()
        self.core.execution.require_ready()

    def restart(self) -> None:
        """Start again with empty memory; unfinished calls fail with `EngineClosedError`.

        Works also after a failure has ended its thread. Handles stay valid: messages are computed again when read.

        Raises:
            EngineClosedError: The engine was closed.
        """
        self.core.restart()

    def close(self) -> None:
        """Write KV that is to be kept, and stop the engine for all tenants; unfinished calls fail with
        `EngineClosedError`."""
        for tenant in [*self._open.values()]:
            tenant.stop()
        self.core.close()


def _load_model(
    model: str | Path | LoadedModel, backend: BackendName | AttentionBackend, options: dict[str, Any]
) -> LoadedModel:
    explicit = {name: value for name, value in options.items() if value is not None}
    if not isinstance(model, LoadedModel):
        return load_model(model, backend=backend, **explicit)
    if explicit:
        raise InvalidRequestError(f"the model is loaded already: pass {' and '.join(explicit)} to load_model()")
    return model


def engine_over(
    kind: type[E],
    execution: Execution,
    model: LoadedModel,
    *,
    salt: str,
    adapter: str | Path | None,
    seed: int,
    sink: EventSink,
) -> E:
    """Return an engine whose requests run where an execution says: its own KV memory is always empty.

    Args:
        kind: Class of the engine.
        execution: Runs its requests.
        model: Model that it serves, perhaps without weights.
        salt: This and what follows: see `Engine.load`.
    """
    memory = Memory(kv_budget_bytes=_EMPTY_BYTES)
    settings = Settings(method="choreo", memory=memory, scheduling=Scheduling(), backend="auto", seed=seed, sink=sink)
    own = None if adapter is None else read_loaded(model.adapter, adapter)
    return kind(EngineAdmin(EngineCore(model, settings, own, execution)), salt, is_owners=True)


def twin_of(engine: Engine, method: MethodName) -> Engine:
    """Return an engine with the same model, settings and adapters but another method, and with nothing encoded.

    It has memory of its own and no persistent folder; close it after use. Raises `InvalidRequestError` for a remote
    engine.
    """
    core, tenant = engine._core, engine._tenant
    if core.execution.elsewhere:
        raise InvalidRequestError(
            f"methods can be compared by engines of this process only, but {engine!r} is remote: compile the graph "
            f"with Engine.load({core.model.name!r})"
        )
    with core.lock:
        folders, own = core.adapters.folders(tenant.name), core.adapters.default
    settings = core.settings
    twin = Engine.load(
        core.model,
        method=method,
        memory=settings.memory.model_copy(update={"disk": None, "persist_dir": None}),
        scheduling=settings.scheduling,
        backend=settings.backend,
        seed=settings.seed,
        adapter=None if own is None else folders[own[0]],
    )
    for name in folders.keys() - {*twin.adapters}:
        twin.load_adapter(folders[name], name)
    return twin
