"""What the nodes of one superstep tell each other before it ends. One board for each run of one graph."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphBubbleUp, NodeTimeoutError
from langgraph.types import RetryPolicy, TimeoutPolicy

from choreo_agents.graph.langgraph_internals import (
    attempt_of,
    author_of,
    hidden_in,
    superstep_of,
    task_of,
    with_hidden,
)

_BOARD = "board"


@dataclass(frozen=True)
class BranchUpdate:
    """What one execution of a node has said."""

    author: str
    """The node, behind the subgraphs that it stands in."""
    task: str
    """LangGraph's, of the node alone: the same again if the node is run again."""
    update: Mapping[str, Any]
    """Of the graph's state."""


@dataclass(frozen=True)
class Reporting:
    """What becomes of a node that fails."""

    retries: Sequence[RetryPolicy] = ()
    """When LangGraph runs it again."""
    timeout: TimeoutPolicy | None = None
    """When LangGraph cancels it, and takes that for a `NodeTimeoutError`."""
    handled: bool = False
    """Whether a node of the graph handles its errors, so that the run goes on."""


@dataclass
class _Superstep:
    said: dict[str, BranchUpdate] = field(default_factory=dict)
    """By task; `left` likewise: who will say nothing any more, and whether the run stops for that."""
    left: dict[str, tuple[str, bool]] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    """The task of each node that waits for others."""


class Board:
    """Branches by superstep. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._supersteps: dict[int, _Superstep] = defaultdict(_Superstep)
        self._listeners: list[Callable[[], None]] = []

    def say(self, superstep: int, branch: BranchUpdate) -> None:
        """A branch is done."""
        with self._lock:
            now = self._at(superstep)
            now.said[branch.task] = branch
            now.left.pop(branch.task, None)
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def leave(self, superstep: int, author: str, task: str, *, stops: bool) -> None:
        """A branch will say nothing; or nothing before its run, which stops for that, goes on."""
        with self._lock:
            self._at(superstep).left[task] = (author, stops)
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def read(self, superstep: int, authors: frozenset[str]) -> tuple[list[BranchUpdate], list[bool]]:
        """What some nodes have said in a superstep, and of those who left, whether the run stops for that."""
        with self._lock:
            now = self._at(superstep)
            said = [branch for branch in now.said.values() if branch.author in authors]
            return said, [stops for author, stops in now.left.values() if author in authors]

    def enter(self, superstep: int, author: str, task: str) -> bool:
        """Whether no other execution of this node waits in the same superstep."""
        with self._lock:
            return self._at(superstep).readers.setdefault(author, task) == task

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call it, on any thread, whenever a branch is done or leaves."""
        with self._lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def _at(self, superstep: int) -> _Superstep:
        # When one superstep runs, those before are over.
        for over in [each for each in self._supersteps if each < superstep]:
            del self._supersteps[over]
        return self._supersteps[superstep]


def with_board(config: RunnableConfig | None) -> RunnableConfig:
    """The config of a run that has a board of its own."""
    return with_hidden(config, _BOARD, Board())


def board_of(config: RunnableConfig) -> Board | None:
    """The board of the run that a node stands in."""
    found = hidden_in(config, _BOARD)
    return found if isinstance(found, Board) else None


@contextmanager
def reported(config: RunnableConfig, node: str, reporting: Reporting) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Put on the board what a node says in the block, or that it leaves without having said anything.

    Args:
        config: The node's.
        node: Its name.
        reporting: When it fails: what LangGraph tries again is no farewell.

    Yields:
        What takes the node's update.
    """
    board = board_of(config)
    superstep, author, task = superstep_of(config), author_of(config, node), task_of(config)
    try:
        yield lambda update: None if board is None else board.say(superstep, BranchUpdate(author, task, update))
    except BaseException as error:
        failed = error
        if isinstance(error, asyncio.CancelledError) and reporting.timeout is not None:
            failed = _timed_out(node, reporting.timeout)  # or the run is over, and nobody waits
        if board is not None and not _is_retried(failed, reporting.retries, config):
            board.leave(superstep, author, task, stops=isinstance(error, GraphBubbleUp) or not reporting.handled)
        raise


def _timed_out(node: str, policy: TimeoutPolicy) -> NodeTimeoutError:
    """What LangGraph makes of a node's time being over."""
    limits: Any = {"run_timeout": policy.run_timeout, "idle_timeout": policy.idle_timeout}
    kind: Any = "idle" if policy.run_timeout is None else "run"
    return NodeTimeoutError(node, limits[f"{kind}_timeout"], kind=kind, **limits)


def _is_retried(error: BaseException, retries: Sequence[RetryPolicy], config: RunnableConfig) -> bool:
    """Whether LangGraph runs the node again after this error."""
    if isinstance(error, GraphBubbleUp) or not isinstance(error, Exception):
        return False
    policy = next((each for each in retries if _matches(each, error)), None)
    return policy is not None and attempt_of(config) < policy.max_attempts


def _matches(policy: RetryPolicy, error: Exception) -> bool:
    retry_on: Any = policy.retry_on
    if isinstance(retry_on, type):
        return isinstance(error, retry_on)
    return isinstance(error, tuple(retry_on)) if isinstance(retry_on, Sequence) else bool(retry_on(error))
