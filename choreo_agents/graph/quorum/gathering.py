"""Waits for the branches that a synthesizer merges, in the superstep that they run in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphInterrupt
from typing_extensions import is_typeddict

from choreo_agents.errors import InvalidRequestError, QuorumError
from choreo_agents.graph import langgraph_internals
from choreo_agents.graph.quorum.board import Board, BranchUpdate, board_of
from choreo_agents.graph.state import with_said
from choreo_agents.graph.turn.turn import Speaker
from choreo_agents.graph.words.entries import said_in

_EXPECTED, _SPEAKERS = "choreo_expected", "choreo_speakers"


@dataclass(frozen=True)
class QuorumPlan:
    """What a compiled graph tells a synthesizer that starts before all its branches are in."""

    merged: Mapping[str, Speaker]
    """By node, whom it merges in its own superstep."""
    waiting: int
    """How many synthesizers of the graph may wait at once, itself among them."""
    schema: type[Any]
    """Of the graph's state, and its `channels`."""
    channels: Sequence[str]


def expecting(branches: int | None, speakers: Iterable[str] = ()) -> dict[str, Any]:
    """What starts a synthesizer together with so many branches; None: with one of each that it merges.

    Args:
        branches: How many.
        speakers: The names that some of them were sent, to speak under.
    """
    return {_EXPECTED: branches, _SPEAKERS: sorted(set(speakers))}


def state_before(config: RunnableConfig, schema: type[Any], channels: Sequence[str]) -> Any:
    """The graph's state as it is before a node's superstep, whatever the node was sent.

    Args:
        config: The node's.
        schema: Of the state, and its `channels`.
    """
    values = langgraph_internals.state_before(config, channels)
    return values if is_typeddict(schema) else schema(**values)


class Gathering:
    """The branches of one superstep, as one execution of a synthesizer waits for them.

    Args:
        node: The synthesizer's name.
        sources: The nodes that it merges.
        given: What it was started with.
        config: Its own.
    """

    def __init__(self, node: str, sources: frozenset[str], given: Any, config: RunnableConfig) -> None:
        board = board_of(config)
        if board is None:
            raise InvalidRequestError(
                f"{node!r} has a quorum, which only a ChoreoGraph can keep: add it to one, or leave quorum out"
            )
        if not (isinstance(given, Mapping) and _EXPECTED in given) and not langgraph_internals.is_joined(config):
            raise InvalidRequestError(
                f"{node!r} has a quorum, and something else than what starts its branches has started it: let a "
                "route start its branches instead, or leave quorum out"
            )
        self._board: Board = board
        self._config = config
        self._superstep = langgraph_internals.superstep_of(config)
        self._author = langgraph_internals.author_of(config, node)
        home = self._author.rpartition("|")[0]
        self._authors = frozenset(f"{home}|{source}" if home else source for source in sources)
        told = given.get(_EXPECTED) if isinstance(given, Mapping) else None
        self.expected = len(sources) if told is None else int(told)
        """Executions of the merged nodes in this superstep."""
        self._is_told = told is not None
        self.speakers = frozenset[str](given.get(_SPEAKERS) or () if isinstance(given, Mapping) else ())
        """The names that branches were sent, to speak under."""
        self._before: list[BranchUpdate] = []
        """Branches that were done before the run was interrupted."""
        self._taken: set[str] = set()
        self._changed = asyncio.Event()

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Hear of branches during the block.

        Yields:
            False: another execution of the node, started by another edge, speaks in this superstep already.

        Raises:
            InvalidRequestError: Two routes have started it, with branches of their own.
        """
        loop = asyncio.get_running_loop()

        def changed() -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits
                loop.call_soon_threadsafe(self._changed.set)

        first = self._board.enter(self._superstep, self._author, langgraph_internals.task_of(self._config))
        if not first and self._is_told:
            raise InvalidRequestError(
                f"two routes have started {self._author!r} in one superstep, each with branches of its own: start all "
                "branches from one route, or leave quorum out"
            )
        with self._board.listening(changed):
            yield first

    async def enough(self, quorum: int, deadline_s: float | None) -> list[BranchUpdate]:
        """The branches that are in as soon as a synthesizer may start.

        Args:
            quorum: How many it waits for; all, if fewer run.
            deadline_s: Seconds from now on after which one is enough; None: never.

        Raises:
            QuorumError: So many have failed that it cannot be reached, though the run goes on.
        """
        self._before = await _done_before(self._config, self._authors)
        started, wanted = time.monotonic(), min(quorum, self.expected)
        while True:
            self._changed.clear()
            said, left = self._read()
            is_late = deadline_s is not None and time.monotonic() - started >= deadline_s
            is_all = len(said) + len(left) >= self.expected and not any(left)
            if len(said) >= wanted or (said and (is_late or (deadline_s is not None and is_all))):
                self._taken.update(branch.task for branch in said)
                return said
            if self.expected - len(left) < wanted:
                if any(left):
                    # The run stops for what became of them, whose word it is: when it goes on, this runs again, too.
                    raise GraphInterrupt(())
                if deadline_s is None or len(left) >= self.expected:
                    raise QuorumError(
                        f"{self._author!r} waits for {wanted} of {self.expected} branches, and {len(left)} of them "
                        "have failed: see their errors, or lower its quorum"
                    )
            patience = None if deadline_s is None or is_late else deadline_s - (time.monotonic() - started)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), patience)

    @property
    def next_superstep(self) -> int:
        """Behind all branches that are done."""
        said = [entry["superstep"] for branch in self._read()[0] for entry in said_in(branch.update)]
        return 1 + max(said, default=-1)

    @property
    def outstanding(self) -> int:
        """Branches that have not been taken yet."""
        return self.expected - len(self._taken)

    def taken(self) -> list[BranchUpdate]:
        """The branches that it was given so far."""
        return [branch for branch in self._read()[0] if branch.task in self._taken]

    async def late(self) -> AsyncGenerator[BranchUpdate]:
        """The other branches, as they are done."""
        while True:
            self._changed.clear()
            said, left = self._read()
            for branch in said:
                if branch.task not in self._taken:
                    self._taken.add(branch.task)
                    yield branch
            if len(self._taken) + len(left) >= self.expected:
                return
            await self._changed.wait()

    def _read(self) -> tuple[list[BranchUpdate], list[bool]]:
        said, left = self._board.read(self._superstep, self._authors)
        by_task = {branch.task: branch for branch in (*self._before, *said)}
        return sorted(by_task.values(), key=_place), left


def _place(branch: BranchUpdate) -> tuple[str, int]:
    """Branches are listed by node, and by their sends."""
    return branch.author, min((entry["branch"] for entry in branch.update.get("handles") or []), default=0)


def with_branches(state: Any, branches: Sequence[BranchUpdate]) -> Any:
    """The state as it is after these branches."""
    for branch in branches:
        state = with_said(state, branch.update)
    return state


async def _done_before(config: RunnableConfig, authors: frozenset[str]) -> list[BranchUpdate]:
    """Branches that were done when the superstep was interrupted: what they wrote waits in the checkpoint."""
    by_task: dict[str, dict[str, Any]] = {}
    for task, channel, value in await langgraph_internals.pending_writes(config):
        if channel in ("handles", "messages"):
            by_task.setdefault(task, {})[channel] = value
    if not by_task:
        return []
    before = langgraph_internals.state_before(config, ["handles"]).get("handles") or []
    known = {entry["message_id"] for entry in before}
    done: list[BranchUpdate] = []
    for task, update in by_task.items():
        # Another synthesizer, or a subgraph, hands on what others have said.
        said = said_in(update) if all(isinstance(value, list) for value in update.values()) else []
        wrote = {entry["author"] for entry in said}
        if len(wrote) == 1 and wrote <= authors and not any(entry["message_id"] in known for entry in said):
            done.append(BranchUpdate(wrote.pop(), task, update))
    return done
