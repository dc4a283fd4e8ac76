"""Restricts an engine to one reader: it can attend to, and read, only the handles that it was granted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from choreo_agents.engine import Engine, Prefill, StreamedToken
from choreo_agents.engine.calls import Content
from choreo_agents.errors import ForeignHandleError, HandleError, UnknownHandleError, VisibilityError
from choreo_agents.graph.state import HandleEntry, handle_for
from choreo_agents.graph.visibility import SHARED
from choreo_agents.kv.handle import MessageHandle


class BoundEngine:
    """Prefills and decodes for one reader, over handles that it was granted or has made itself."""

    def __init__(self, engine: Engine, reader: str) -> None:
        self.engine = engine
        self._reader = reader
        self.shared: list[MessageHandle] = []
        """Prefills that other readers, or this agent's next call, ask for too: one lease of each stays."""
        self.copies: list[MessageHandle] = []
        """Handles that were made for this call alone."""
        self._attended: set[str] = set()
        self.granted: dict[str, MessageHandle] = {}
        """All handles that the reader may read, by id."""

    def grant(self, handle: MessageHandle, *, words_only: bool = False) -> MessageHandle:
        """Let the reader attend to a message, or read its text only, and return the handle."""
        self.granted[handle.id] = handle
        if not words_only:
            self._attended.add(handle.id)
        return handle

    @property
    def model(self) -> str:
        """The fingerprint of its model."""
        return self.engine.model.adapter.fingerprint

    def handle(self, entry: HandleEntry) -> MessageHandle:
        """Return the handle of a message for the reader's model.

        Raises:
            ForeignHandleError: The reader's model has not encoded it: the handle is another model's.
        """
        handle = handle_for(entry, self.model)
        if handle is None:
            stored = MessageHandle.model_validate(entry["handle"])
            raise ForeignHandleError(
                f"handle {stored.id!r} is of model {stored.base_model!r}, but {self._reader!r} runs on {self.model!r}"
            )
        return handle

    def knows(self, handle: MessageHandle) -> bool:
        """Return whether the engine knows a handle, unlike another model's, or a closed engine's. One that was released
        on purpose is known: reading it raises."""
        return not isinstance(self._refusal(handle), UnknownHandleError | ForeignHandleError)

    def if_alive(self, handle: MessageHandle | None) -> MessageHandle | None:
        """Return a handle if the engine still has it, or it is another model's; else None."""
        return handle if handle is not None and isinstance(self._refusal(handle), ForeignHandleError | None) else None

    def _refusal(self, handle: MessageHandle) -> HandleError | None:
        """Return the error that the engine raises for a handle, if any."""
        try:
            self.engine.usage(handle)
        except HandleError as error:
            return error
        return None

    def words(self, entry: HandleEntry) -> list[int]:
        """Let the reader read a message's text, and return its tokens."""
        return self.tokens(self.grant(self.handle(entry), words_only=True))

    def tokens(self, handle: MessageHandle) -> list[int]:
        """Return a message's tokens, with its header and turn end.

        Raises:
            VisibilityError: The handle was not granted.
        """
        if handle.id not in self.granted:
            raise VisibilityError(
                f"{self._reader!r} may not read handle {handle.id!r}: show its source to {self._reader!r}"
            )
        return self.engine.tokens(handle)

    async def aprefill(self, calls: Sequence[Prefill]) -> list[MessageHandle]:
        """Prefill as `Engine.aprefill` does, lazily, and grant the new handles.

        Raises:
            VisibilityError: A parent was not granted.
        """
        if not calls:
            return []
        for call in calls:
            self._require(call.parents)
        lazy = [replace(call, lazy=True) for call in calls]
        return [self.grant(handle) for handle in await self.engine.aprefill(lazy)]

    async def prefill_shared(self, calls: Sequence[Prefill]) -> list[MessageHandle]:
        """Prefill messages that are the same for all readers, and keep one lease of each after the call."""
        handles = await self.aprefill(calls)
        self.shared += handles
        return handles

    def astream(
        self, header: Content, parents: Sequence[MessageHandle], **options: Any
    ) -> AsyncGenerator[StreamedToken | MessageHandle]:
        """Decode as `Engine.astream` does.

        Raises:
            VisibilityError: A parent was not granted.
        """
        self._require(parents)
        return self.engine.astream(header, parents, **options)

    def keep(self, handle: MessageHandle | None) -> None:
        """Keep a handle that was made for this call after it."""
        self.copies = [copy for copy in self.copies if copy != handle]

    def release(self) -> None:
        """Release what was made for this call alone, and all but one lease of what is shared."""
        with suppress(HandleError):  # a scope may have ended meanwhile
            for handle in self.shared:
                self.engine.release(handle, keep_last=True)
            for handle in self.copies:
                self.engine.release(handle)

    def _require(self, parents: Sequence[MessageHandle]) -> None:
        for parent in parents:
            if parent.id not in self._attended:
                words = (
                    f"read its text only: share its source ({SHARED!r})" if parent.id in self.granted else "not read it"
                )
                raise VisibilityError(f"{self._reader!r} may not attend to handle {parent.id!r}, it may {words}")
