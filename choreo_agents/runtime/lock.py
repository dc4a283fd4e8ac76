"""The engine's lock, which only the process that made it may take."""

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
    """Guards an engine's bookkeeping; taken again by the thread that has it.

    A process that was forked has the engine's memory and none of its threads, and perhaps a lock that nobody gives
    back: there, taking it raises `EngineForkedError` at once instead of waiting for ever.
    """

    forks: ClassVar[int] = 0
    """How many processes were forked on the way to this one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.taken = 0
        """How often it was taken, but for `quietly`: while that is what it was, nobody has changed what it guards."""
        self._made_after = EngineLock.forks

    @property
    def is_the_parents(self) -> bool:
        """Whether the engine was loaded before this process was forked."""
        return self._made_after != EngineLock.forks

    def require_own(self) -> None:
        """Raise `EngineForkedError` unless this process has loaded the engine."""
        if self._made_after != EngineLock.forks:
            raise EngineForkedError(
                "the engine was loaded before this process was forked, and is the parent's: load one in this process, "
                "or start it with multiprocessing's spawn"
            )

    def condition(self) -> threading.Condition:
        """What waits and is notified under it."""
        return threading.Condition(self._lock)

    def __enter__(self) -> None:
        self.require_own()
        self._lock.acquire()
        self.taken += 1

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Take it without counting: for the loop, which knows what it changes."""
        self.require_own()
        with self._lock:
            yield

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def compute_after_fork() -> None:
    """In a process that was forked, let torch compute on one thread: those that the parent had are gone, and OpenMP
    would wait for them for ever."""
    if EngineLock.forks and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        warnings.warn(
            "this process was forked, where OpenMP's threads cannot be used: torch computes on one. Start it with "
            "multiprocessing's spawn to use all",
            RuntimeWarning,
            stacklevel=3,
        )


def _forked() -> None:
    EngineLock.forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
