"""Writes KV to a store, on a thread of its own that lasts as long as there is something to write."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from choreo_agents.errors import EngineClosedError
from choreo_agents.kv.store.key import KVKey
from choreo_agents.kv.store.store import KVStore
from choreo_agents.kv.tiers import HostKV


class Unwritten(Protocol):
    """KV of one message that is to be written, and can be had until it is released."""

    id: str
    """The message's."""
    nbytes: int
    """That it will take on the host."""

    def read(self) -> tuple[KVKey, HostKV]:
        """A copy; may take as long as a step.

        Raises:
            ChoreoError: It cannot be had any more.
        """
        ...

    def release(self) -> None:
        """It is needed no longer. Called once."""
        ...


_Job = tuple[Sequence[Unwritten], Sequence[str]]
"""What is to be written, and of which messages files are to be removed."""


class KVWriter:
    """Does what is asked of it one after the other, copying one message at a time. May be used from any thread.

    Args:
        store: Gets the files.
        failed: Told that files cannot be written: of what, and why. Not again before one could be.
    """

    def __init__(self, store: KVStore, failed: Callable[[Path, str], None] = lambda path, why: None) -> None:
        self._store = store
        self._failed = failed
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._thread: threading.Thread | None = None
        self._asked = self._done = 0
        self._error: BaseException | None = None
        """The first since the last `flush`; one of files rather than any other."""
        self._failing = self._closed = False

    def write(self, messages: Sequence[Unwritten]) -> None:
        """Have messages written that have no file yet; each is released then, whatever comes of it.

        Raises:
            EngineClosedError: The writer was closed. They are released.
        """
        if messages:
            self._ask((messages, ()))

    def drop(self, message_ids: Sequence[str]) -> None:
        """Have files removed, those of messages that are still to be written included; raises what `write` raises."""
        if message_ids:
            self._ask(((), message_ids))

    def wait(self) -> None:
        """Return when everything that was asked before has been tried; `flush` tells what failed."""
        with self._changed:
            asked = self._asked
            self._changed.wait_for(lambda: self._done >= asked or not self._works())

    def flush(self) -> None:
        """Return when everything that was asked before is written.

        Raises:
            OSError: Something could not be. ChoreoError: It could not be had any more.
        """
        self.wait()
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, *, wait: bool = True) -> None:
        """Be asked nothing more; and, on another thread, return when all that was asked has been tried."""
        with self._changed:
            self._closed = True
        if wait:
            self.wait()

    def _ask(self, job: _Job) -> None:
        with self._changed:
            closed, begun = self._closed, not self._closed and self._begun()
            if begun:
                self._jobs.append(job)
                self._asked += 1
        for message in job[0] if not begun else ():
            self._try(message.release)
        if closed:
            raise EngineClosedError("nothing more is written here: the engine, or its tenancy, was closed")

    def _begun(self) -> bool:
        """Whether there is a thread, or was one to be had."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="choreo-write")
            try:
                thread.start()  # which waits for the lock
            except RuntimeError as error:
                self._error = self._error or error
                return False
            self._thread = thread
        return True

    def _works(self) -> bool:
        """Whether somebody else will do what is left: nobody does in a process that was forked."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            for message in job[0]:
                self._try(partial(self._write, message))
                self._try(message.release)
            for message_id in job[1]:
                self._try(partial(self._store.drop, message_id))
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            if self._jobs:
                return self._jobs.popleft()
            self._thread = None
            return None

    def _write(self, message: Unwritten) -> None:
        if message.nbytes > self._store.budget_bytes or self._store.has(message.id):
            return
        key, kv = message.read()
        try:
            self._store.save(key, kv)
            self._failing = False
        except OSError as error:
            known, self._failing = self._failing, True
            if not known:
                self._try(partial(self._failed, self._store.folder, str(error)))
            raise

    def _try(self, work: Callable[[], None]) -> None:
        """Do something; what fails in it is told by `flush`, and is in nobody else's way."""
        try:
            work()
        except BaseException as error:
            error = error.with_traceback(None)  # which would keep what was to be written
            error.__context__ = None
            with self._changed:
                if self._error is None or isinstance(error, OSError) > isinstance(self._error, OSError):
                    self._error = error
