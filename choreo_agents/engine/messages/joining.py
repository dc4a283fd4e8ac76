"""Lets a caller show messages to a decode that is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.lock import EngineLock


class GrowingView(Protocol):
    """The view of one decode."""

    over: bool
    """Whether the decode has ended."""
    has_room: Callable[[Any], bool]
    """Asked before a message comes into the pool for it."""

    def add(self, parent: Any, offset: int) -> None:
        """Let a message come into it."""
        ...


class Joining:
    """Brings messages into the view of a decode between two of its steps. May be used from any thread.

    Made by `Branches.joining`, given to one call of `decode`, `astream` or their kin, before it or while it runs.

    Args:
        maker: Whose calls it is for.
        lock: The engine's.
        read: Finds a handle's message and checks its position; raises what `add` raises.
        has_room: Whether a message may come into the pool beside what the maker's calls read there.
    """

    def __init__(
        self,
        maker: object,
        lock: EngineLock,
        read: Callable[[MessageHandle, int], Any],
        has_room: Callable[[Any], bool],
    ) -> None:
        self.maker = maker
        self._lock = lock
        self._read = read
        self._has_room = has_room
        self._views: list[GrowingView] = []
        self._added: list[tuple[Any, int]] = []
        self._call: object = None
        """Whose decode has begun."""

    def add(self, handle: MessageHandle, offset: int) -> bool:
        """Show a message to the decode, from its next token on, as soon as the message's KV is in the pool.

        The decode waits for nothing: what is still on its way when the last token was sampled is left out, and what
        the tenant's `Quota` has no room for beside what its calls read. What was seen, and from which token on,
        `Inspection.joined` says of the finished message.

        Args:
            handle: The message. It may be released right away.
            offset: The position of its first token, in the call's own positions.

        Returns:
            False if the decode has ended, was answered before, or takes in nothing since its method keeps text only.

        Raises:
            HandleError: The handle is unknown, released, or another model's or tenant's.
            ContextLengthError: It would reach past the model's context. InvalidRequestError: No position.
        """
        with self._lock:
            message = self._read(handle, offset)
            running = [view for view in self._views if not view.over]
            for view in running:
                view.add(message, offset)
            if self._call is None:
                self._added.append((message, offset))
            return bool(running) or self._call is None

    def begin(self, call: object, view: GrowingView | None) -> None:
        """A call's decode, or one more of its answers, starts over this view; None: it takes nothing in.

        For the engine, under its lock.

        Raises:
            InvalidRequestError: It is for another call.
        """
        if self._call is not None and self._call is not call:
            raise InvalidRequestError("the joining was given to another call: make one for each with joining()")
        self._call = call
        if view is None or view.over:
            return
        view.has_room = self._has_room
        self._views.append(view)
        for message, offset in self._added:
            view.add(message, offset)
