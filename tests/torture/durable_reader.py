"""Who hears all that is reported, forgets nothing of it, and looks whether it is kept."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, NamedTuple

from langgraph.store.base import BaseStore, SearchOp
from langgraph.store.memory import InMemoryStore

from choreo_agents import Engine
from choreo_agents.engine.lineage import ReadLog
from choreo_agents.graph.durable.thread_log import ROOT, ThreadLog, run_store_ops

Place = tuple[str, int, int, int]
"""Author, superstep, branch and call."""


class Reported(NamedTuple):
    """A message that a caller has been told of whole."""

    handle: str
    words: str | None
    """None: of what was put in, which the caller knew."""

    def is_same(self, other: Reported | None) -> bool:
        if other is None or self.handle != other.handle:
            return False
        return None in (self.words, other.words) or self.words == other.words


@dataclass
class ThreadHeard:
    """All that was heard of a thread, by whichever process."""

    said: dict[Place, Reported] = field(default_factory=dict)
    ids: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    streams: dict[tuple[str, ...], dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """Words streamed, by where in the run; and there by the process and the message's id."""
    decoded: list[tuple[Place, frozenset[str]]] = field(default_factory=list)
    """What was really decoded, and which answers stood in the store before that leg."""


@dataclass
class Reader:
    """Hears journals. What is wrong stands in `wrong`."""

    threads: dict[str, ThreadHeard] = field(default_factory=lambda: defaultdict(ThreadHeard))
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def hear(self, told: Mapping[str, Any], process: int, answers: frozenset[str]) -> None:
        """Hear a line of a process's journal.

        Args:
            told: The line.
            process: Which.
            answers: That stood in the store, of this thread, when the process began its leg.
        """
        if told["kind"] == "update":
            for each in told["said"]:
                self._hear_said(told["thread"], tuple(each["place"]), each)
        elif told["kind"] == "token":
            self.counts["tokens streamed"] += 1
            streams = self.threads[told["thread"]].streams[tuple(map(str, told["at"]))]
            name = f"{process} {told['id']}"
            streams[name] = streams.get(name, "") + told["text"]
        elif told["kind"] == "decoded":
            self.counts["decodes"] += 1
            self.threads[told["thread"]].decoded.append((tuple(told["place"]), answers))

    def _hear_said(self, thread: str, place: Place, told: Mapping[str, Any]) -> None:
        heard = self.threads[thread]
        now, before = Reported(told["handle"], told["words"]), heard.said.setdefault(place, None)  # type: ignore[arg-type]
        heard.said[place] = before or now
        heard.ids[place].add(told["id"])
        self.counts["messages reported"] += 1
        if before is not None:
            self.counts["messages reported again"] += 1
            self.require(before.is_same(now), f"{thread}: {place} said {before}, and now {now}")

    def require(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.wrong.append(what)

    def look_at_state(self, thread: str, values: Mapping[str, Any], noted: Set[str]) -> None:
        """A thread has come to an interrupt, or its end: what was reported stands in its state and among its notes."""
        heard = self.threads[thread]
        words = {message.id: str(message.text) for message in values["messages"]}
        state = {
            (entry["author"], entry["superstep"], entry["branch"], entry.get("call", 0)): Reported(
                entry["handle"]["id"], words[entry["message_id"]]
            )
            for entry in values["handles"]
        }
        for place, reported in heard.said.items():
            self.require(reported.is_same(state.get(place)), f"{thread}: {place} was {reported}, is {state.get(place)}")
            self.require(reported.handle in noted, f"{thread}: {place} was reported, and nothing is noted of it")
        for place, before in heard.decoded:
            said = state.get(place)
            self.require(
                said is None or said.handle not in before,
                f"{thread}: {place} was decoded again, though its answer stood in the store",
            )
        for at, streams in heard.streams.items():
            whole = self._said_at(at, streams, heard)
            for process in {name.split()[0] for name in streams}:
                texts = [text for name, text in streams.items() if name.split()[0] == process]
                matched = any(all(map(str.startswith, said, texts)) for said in permutations(whole, len(texts)))
                self.require(matched, f"{thread}: {texts} were streamed at {at}, where {whole} was said")

    def _said_at(self, at: tuple[str, ...], streams: Mapping[str, str], heard: ThreadHeard) -> list[str]:
        """What was said in the end in one place of a run: by the ids that a stream and an update share."""
        ids = {name.split()[1] for name in streams}
        return [said.words for place, said in heard.said.items() if place[0] == at[0] and ids & heard.ids[place]]

    def look_at_end(self, thread: str, expected: Mapping[Place, Reported]) -> None:
        """It has ended: it has said what it would have said if nobody had killed it."""
        said = self.threads[thread].said
        for place, reported in expected.items():
            self.require(
                reported.is_same(said.get(place)), f"{thread}: {place} should be {reported}, is {said.get(place)}"
            )
        self.counts["threads ended"] += 1


Kept = Mapping[str, ReadLog]
"""All that a store has of a tenant's threads, by the names that they have there."""


def read_store(store: BaseStore, engine: Engine) -> Kept:
    """All that an engine's tenant has there."""
    [items] = asyncio.run(
        run_store_ops(store, [SearchOp((ROOT, engine.lineage.name), limit=1 << 30, refresh_ttl=False)])
    )
    found: dict[str, ReadLog] = {}
    for place in {item.namespace for item in items}:
        log = ThreadLog(store, engine, "")
        log.place = place
        found[place[-1]] = asyncio.run(log.read())
    return found


def damage(kept: Kept, engine: Engine) -> list[str]:
    """What is wrong with logs: seals, and what names a message that has no row."""
    wrong: list[str] = []
    for thread, log in kept.items():
        wrong += [] if log.damaged is None else [f"log {thread}: {log.damaged}"]
        for message_id, key in log.keys.items():
            lacks = [each for each, _ in key.parents if each not in log.keys]
            wrong += [f"row {message_id} of {thread} lacks its parent {each}" for each in lacks]
        for message_id, note in log.messages.items():
            named = [message_id, *(each for each, _ in note.thoughts)]
            wrong += [f"note {message_id} of {thread} has no row {each}" for each in named if each not in log.keys]
        answered = [each for each in log.answers.values() if each not in log.messages]
        wrong += [f"an answer of {thread} is {each}, of which nothing is noted" for each in answered]
    return wrong


def log_in(kept: Kept, engine: Engine, thread: str) -> ReadLog:
    """What a thread has written."""
    return kept.get(ThreadLog(InMemoryStore(), engine, thread).place[-1], ReadLog())
