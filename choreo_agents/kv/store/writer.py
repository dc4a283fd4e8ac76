"""Background writer of KV to a store, on a thread that runs while there is something to write."""

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
    """KV of a message that is to be written; it can be read until it is released."""

    id: str
    """Id of the message."""
    nbytes: int
    """Bytes that its copy takes on the host."""

    def read(self) -> tuple[KVKey, HostKV]:
        """Copy the KV to the host; may take as long as a step.

        Raises:
            ChoreoError: It is not available any more.
        """
        ...

    def release(self) -> None:
        """Release the KV. Called once."""
        ...


_Job = tuple[Sequence[Unwritten], Sequence[str]]
"""Messages to write, and ids of messages whose files are to be removed."""


class KVWriter:
    """Writer that does its jobs in order, and copies one message at a time to the host. Thread-safe.

    Args:
        store: Store of the files.
        failed: Called with the directory and the reason when writing fails; not again until a write succeeds.
    """

    def __init__(self, store: KVStore, failed: Callable[[Path, str], None] = lambda path, why: None) -> None:
        self._store = store
        self._failed = failed
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._thread: threading.Thread | None = None
        self._submitted = self._done = 0
        self._error: BaseException | None = None
        """First error since the last `flush`; an `OSError` takes precedence."""
        self._failing = self._closed = False

    def write(self, messages: Sequence[Unwritten]) -> None:
        """Write messages that have no file yet, in the background; each is released then, in any case.

        Raises:
            EngineClosedError: The writer is closed. The messages are released.
        """
        if messages:
            self._submit((messages, ()))

    def drop(self, message_ids: Sequence[str]) -> None:
        """Remove files in the background, also of messages that are still to be written; raises as `write`."""
        if message_ids:
            self._submit(((), message_ids))

    def wait(self) -> None:
        """Wait until all jobs submitted before were tried; `flush` raises what failed."""
        with self._changed:
            target = self._submitted
            self._changed.wait_for(lambda: self._done >= target or not self._is_running())

    def flush(self) -> None:
        """Wait until all jobs submitted before are done.

        Raises:
            OSError: A file could not be written. ChoreoError: KV was not available any more.
        """
        self.wait()
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, *, wait: bool = True) -> None:
        """Refuse further jobs and, with `wait`, wait for those submitted; never waits on the writer's own thread."""
        with self._changed:
            self._closed = True
        if wait:
            self.wait()

    def _submit(self, job: _Job) -> None:
        with self._changed:
            closed, begun = self._closed, not self._closed and self._start_thread()
            if begun:
                self._jobs.append(job)
                self._submitted += 1
        # Outside our lock, since release takes the engine's.
        for message in job[0] if not begun else ():
            self._try(message.release)
        if closed:
            raise EngineClosedError("nothing more is written here: the engine, or its tenancy, was closed")

    def _start_thread(self) -> bool:
        """Start the thread if none runs; return False if the system has none left."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="choreo-write")
            try:
                thread.start()  # it waits for the lock that we hold
            except RuntimeError as error:
                self._error = self._error or error
                return False
            self._thread = thread
        return True

    def _is_running(self) -> bool:
        """Return whether another thread does the rest: in a forked process, none does."""
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
            was_failing, self._failing = self._failing, True
            if not was_failing:
                self._try(partial(self._failed, self._store.folder, str(error)))
            raise

    def _try(self, work: Callable[[], None]) -> None:
        """Run a job; keep its error for `flush`, so that it does not stop others."""
        try:
            work()
        except BaseException as error:
            error = error.with_traceback(None)  # a traceback would keep the KV alive
            error.__context__ = None
            with self._changed:
                if self._error is None or isinstance(error, OSError) > isinstance(self._error, OSError):
                    self._error = error
