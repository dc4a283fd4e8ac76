"""The engine: prefill and decode over one global KV cache, sync, async and streaming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import torch

from choreo_agents.engine.calls import Content, Decode, Prefill, StreamedToken, Usage
from choreo_agents.engine.core import Answer, EngineCore, Settings
from choreo_agents.engine.methods import MethodName
from choreo_agents.engine.scope import Scope, current, entered
from choreo_agents.engine.stats import EngineStats
from choreo_agents.engine.streams import stream_async, stream_sync
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, LoadedModel, load_model
from choreo_agents.sampling import Sampling
from choreo_agents.tracing import EventSink, discard


class Engine:
    """An in-process engine over a Hugging Face model.

    `prefill` and `decode` encode a message with attention to any encoded before, wherever the call places them. Calls
    from any thread and event loop share the model's steps. Each handle comes with a lease, which `release` drops.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self._core = EngineCore(model, settings)

    @classmethod
    def load(
        cls,
        model: str | Path | LoadedModel = "embedded",
        *,
        method: MethodName = "choreo",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        kv_budget_bytes: int = 1 << 30,
        host_bytes: int = 0,
        disk: str | Path | None = None,
        disk_bytes: int = 1 << 34,
        step_tokens: int = 512,
        seed: int = 0,
        salt: str = "",
        sink: EventSink = discard,
    ) -> Engine:
        """Load a model and start an engine over it.

        Args:
            model: `"embedded"`, a folder in Hugging Face's layout, a hub name, or a model loaded before.
            method: From the cache, or from re-encoded text (Prompt Choreography, section 3.1).
            device: Where model and KV live; by default the CPU.
            dtype: Of weights and KV; by default fp32 on a CPU, else the checkpoint's own.
            kv_budget_bytes: Upper bound of the KV memory that steps read. What nothing reads or pins leaves it when
                others need the room, the least recently used first, and comes back when it is read.
            host_bytes: Upper bound of the host memory for what left it.
            disk: A folder for what has no room there either. Without one it is computed again from its lineage.
            disk_bytes: Upper bound of this model's files in that folder.
            step_tokens: Tokens encoded in one forward pass at most; longer prefills are cut into chunks.
            seed: From which the seeds of calls without one are derived.
            salt: Separates tenants: another salt never gives the same handle ids.
            sink: Receives trace events on the engine's thread.

        Raises:
            UnsupportedModelError: The model cannot be served exactly. ValueError: A setting is out of range.
        """
        loaded = _loaded(model, device, dtype)
        memory = {"kv_budget_bytes": kv_budget_bytes, "host_bytes": host_bytes, "disk": disk, "disk_bytes": disk_bytes}
        settings = {"method": method, "step_tokens": step_tokens, "seed": seed, "salt": salt, "sink": sink}
        return cls(loaded, Settings.model_validate(memory | settings))

    @property
    def model(self) -> LoadedModel:
        return self._core.model

    @property
    def chat(self) -> ChatFormat:
        """How the model writes chat turns."""
        return self._core.model.chat

    @property
    def seed(self) -> int:
        return self._core.settings.seed

    @property
    def method(self) -> MethodName:
        return self._core.method.name

    @overload
    async def aprefill(
        self,
        content: Content,
        parents: Sequence[MessageHandle] = (),
        offsets: Sequence[int | None] | None = None,
        new_offset: int | None = None,
        *,
        author: str | None = None,
        role: str | None = None,
    ) -> MessageHandle: ...

    @overload
    async def aprefill(self, content: Sequence[Prefill]) -> list[MessageHandle]: ...

    async def aprefill(self, content: Any, *args: Any, **options: Any) -> Any:
        """See `prefill`. Cancelling the awaiting task stops the request and frees its memory."""
        calls, one = _calls(Prefill, content, args, options)
        return await self._await(self._core.submit_prefills(calls, self._scope()), one=one)

    @overload
    def prefill(
        self,
        content: Content,
        parents: Sequence[MessageHandle] = (),
        offsets: Sequence[int | None] | None = None,
        new_offset: int | None = None,
        *,
        author: str | None = None,
        role: str | None = None,
    ) -> MessageHandle: ...

    @overload
    def prefill(self, content: Sequence[Prefill]) -> list[MessageHandle]: ...

    def prefill(self, content: Any, *args: Any, **options: Any) -> Any:
        """Encode given tokens as a message (Prompt Choreography, section 2.3).

        Args:
            content: Text (tokenized without adding anything), token ids, or a list of `Prefill`, which is run as one
                batch and gives a list.
            parents: Messages it attends to, in order.
            offsets: The position of each parent; None, or None for one of them: right after the parent before.
            new_offset: The position of the new message; None: after the last parent.
            author: Who says it, and `role` as what: for traces.

        Returns:
            A leased handle. The same content encoded in the same place again costs nothing.

        Raises:
            InvalidRequestError: Empty content, no token, wrong offsets; `ContextLengthError` and `KVBudgetError` if it
                can never fit. Nothing is encoded then.
            HandleError: A parent is unknown, released, or another model's.
            CapacityError: Leased messages leave no room now.
        """
        calls, one = _calls(Prefill, content, args, options)
        return self._wait(self._core.submit_prefills(calls, self._scope()), one=one)

    @overload
    async def adecode(
        self,
        header: Content,
        parents: Sequence[MessageHandle] = (),
        offsets: Sequence[int | None] | None = None,
        new_offset: int | None = None,
        *,
        sampling: Sampling = ...,
        author: str | None = None,
        closing: Content = (),
        memo: str | None = None,
    ) -> MessageHandle: ...

    @overload
    async def adecode(self, header: Sequence[Decode]) -> list[MessageHandle]: ...

    async def adecode(self, header: Any, *args: Any, **options: Any) -> Any:
        """See `decode`. Cancelling the awaiting task stops the request and frees its memory."""
        calls, one = _calls(Decode, header, args, options)
        return await self._await(self._core.submit_decodes(calls, self._scope()), one=one)

    @overload
    def decode(
        self,
        header: Content,
        parents: Sequence[MessageHandle] = (),
        offsets: Sequence[int | None] | None = None,
        new_offset: int | None = None,
        *,
        sampling: Sampling = ...,
        author: str | None = None,
        closing: Content = (),
        memo: str | None = None,
    ) -> MessageHandle: ...

    @overload
    def decode(self, header: Sequence[Decode]) -> list[MessageHandle]: ...

    def decode(self, header: Any, *args: Any, **options: Any) -> Any:
        """Generate a message that starts with `header` (Prompt Choreography, section 2.3).

        Args:
            header: Text or token ids, not empty; or a list of `Decode`, which is run as one batch and gives a list.
            parents: Messages it attends to, in order; `offsets` and `new_offset` as for `prefill`.
            sampling: How tokens are chosen and when to stop.
            author: Who says it, for traces.
            closing: What the message must end with (see `Decode`).
            memo: Names this very call, so that repeating it returns the first answer (see `Decode`).

        Returns:
            A leased handle; `text` and `tokens` give what was generated.

        Raises:
            See `prefill`.
        """
        calls, one = _calls(Decode, header, args, options)
        return self._wait(self._core.submit_decodes(calls, self._scope()), one=one)

    def astream(self, header: Content, *args: Any, **options: Any) -> AsyncGenerator[StreamedToken | MessageHandle]:
        """Decode one message, yielding each token as it comes and the handle last. Arguments as for `decode`.

        Leaving the loop early cancels the decode.
        """
        return stream_async(self._core, Decode(header, *args, **options), self._scope())

    def stream(self, header: Content, *args: Any, **options: Any) -> Iterator[StreamedToken | MessageHandle]:
        """The sync form of `astream`."""
        return stream_sync(self._core, Decode(header, *args, **options), self._scope())

    def text(self, handle: MessageHandle, *, special: bool = True) -> str:
        """A message's text, with or without special tokens."""
        return self.model.decode(self.tokens(handle), special=special)

    def tokens(self, handle: MessageHandle) -> list[int]:
        """A message's token ids."""
        return list(self._core.find(handle).tokens)

    def usage(self, handle: MessageHandle) -> Usage:
        """What the call that made a message cost."""
        return self._core.find(handle).usage

    def ancestors(self, handle: MessageHandle) -> dict[MessageHandle, str | None]:
        """All that a message's encoding has ever attended to, with authors: nearest first, released ones included."""
        return {message.handle: message.author for message in self._core.find(handle).ancestors()}

    def release(self, handle: MessageHandle, *, spare_only: bool = False) -> None:
        """Drop one lease; with `spare_only`, unless it is the last, after which KV is freed and the handle refused."""
        self._core.release(handle, self._scope(), spare_only=spare_only)

    def pin(self, handle: MessageHandle) -> None:
        """Keep a message in the pool, however little room that leaves; `unpin` takes it back."""
        self._core.pin(handle, 1)

    def unpin(self, handle: MessageHandle) -> None:
        """Undo one `pin`."""
        self._core.pin(handle, -1)

    def park(self, scope: Scope | None = None) -> None:
        """Give the pool's memory back for now: of what only a scope leases, or of everything.

        What is being read or pinned stays. The rest goes to the host or the disk, or is forgotten and computed again,
        and comes back when it is next read: handles stay good.
        """
        self._core.park(scope)

    @contextmanager
    def scope(self) -> Iterator[Scope]:
        """Drop, at the end of the block, every lease that was taken inside and not yet released.

        Yields:
            What `park` takes.
        """
        with entered(id(self)) as scope:
            try:
                yield scope
            finally:
                self._core.close_scope(scope)

    def stats(self) -> EngineStats:
        """What the engine holds now and has done so far."""
        return self._core.stats()

    def check(self) -> None:
        """Assert all invariants of memory and bookkeeping."""
        self._core.check()

    def close(self) -> None:
        """Stop the engine; unfinished calls fail with `EngineClosedError`."""
        self._core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scope(self) -> Scope | None:
        return current(id(self))

    def _wait(self, answers: list[Answer], *, one: bool) -> Any:
        with self._core.given_up_if_left(answers, self._scope()):
            handles = [answer.result() for answer in answers]
        return handles[0] if one else handles

    async def _await(self, answers: list[Answer], *, one: bool) -> Any:
        with self._core.given_up_if_left(answers, self._scope()):
            handles = [await asyncio.wrap_future(answer) for answer in answers]
        return handles[0] if one else handles


def _loaded(
    model: str | Path | LoadedModel, device: str | torch.device | None, dtype: torch.dtype | None
) -> LoadedModel:
    if not isinstance(model, LoadedModel):
        return load_model(model, device=device or "cpu", dtype=dtype)
    if device is not None or dtype is not None:
        raise InvalidRequestError("the model is loaded already: give device and dtype to load_model")
    return model


def _calls(kind: type, content: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], bool]:
    """The calls of a batch, or the one that the arguments spell out; and whether it is one."""
    calls = content if isinstance(content, list | tuple) else []
    if not any(isinstance(call, Prefill | Decode) for call in calls):
        return [kind(content, *args, **options)], True
    if args or options:
        raise InvalidRequestError(f"a batch of {kind.__name__} calls takes no other arguments: give them to each call")
    for call in calls:
        if not isinstance(call, kind):
            raise InvalidRequestError(f"a batch holds {kind.__name__} calls only, not {call!r}")
    return list(calls), False
