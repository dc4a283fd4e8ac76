"""The engine's lock, which only the process that created it may take."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from choreo_agents.errors import EngineForkedError


class EngineLock:
    """Reentrant lock on an engine's bookkeeping.

    A forked process inherits the engine's memory but none of its threads, and perhaps a lock that nobody will release:
    taking it there raises `EngineForkedError` at once instead of waiting for ever.
    """

    forks: ClassVar[int] = 0
    """Number of forks between the first process and this one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.taken = 0
        """Number of acquisitions other than by `quietly`: while it is unchanged, nobody else has changed what the lock
        guards."""
        self._made_after = EngineLock.forks

    @property
    def is_the_parents(self) -> bool:
        """True if the engine was loaded before this process was forked."""
        return self._made_after != EngineLock.forks

    def require_own(self) -> None:
        """Raise `EngineForkedError` unless this process has loaded the engine."""
        if self._made_after != EngineLock.forks:
            raise EngineForkedError(
                "the engine belongs to the parent process, which forked this one: load an engine in this process, or "
                "start it with multiprocessing's spawn"
            )

    def condition(self) -> threading.Condition:
        """Return a condition that waits and is notified under this lock."""
        return threading.Condition(self._lock)

    def __enter__(self) -> None:
        self.require_own()
        self._lock.acquire()
        self.taken += 1

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Hold the lock without counting it: for the loop, which knows what it changes itself."""
        self.require_own()
        with self._lock:
            yield

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def compute_after_fork() -> None:
    """Limit torch to one thread in a forked process: the parent's OpenMP threads are gone, and torch would wait for
    them for ever."""
    if EngineLock.forks and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        warnings.warn(
            "this process was forked, where OpenMP's threads do not work: torch computes on one thread. Start it with "
            "multiprocessing's spawn to use all",
            RuntimeWarning,
            stacklevel=3,
        )


def _forked() -> None:
    EngineLock.forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
