"""Traces as work to do: as many copies of their runs as one wants, made of the product's own messages."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from choreo_agents.engine.messages.message import Lineage, Message
from choreo_agents.engine.messages.placement import Placement
from choreo_agents.engine.messages.usage import Usage
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.lab.simulating.fronts import AskedDecode
from choreo_agents.lab.simulating.trace import RecordedTrace, TracedCall, TracedRun

_UNUSED = Usage(0, 0, None, 0.0)


@dataclass(frozen=True)
class WorkedThread:
    """Runs that follow each other, in one of the copies of their trace."""

    trace: int
    copy: int
    front: int
    """That has its calls run."""
    runs: tuple[TracedRun, ...]

    @property
    def names(self) -> set[str]:
        """Of the messages that its calls read and make."""
        calls = [call for run in self.runs for call in run.calls]
        return {name for call in calls for name in (*call.reads, call.made)}


class Workload:
    """All that is to be done.

    Args:
        traces: What was recorded.
        copies: How often each of them is run, each time with messages of its own; what all runs of a graph are told
            alike is one message for all copies.
        fronts: How many share the threads.
    """

    def __init__(self, traces: Sequence[RecordedTrace], copies: int = 1, fronts: int = 1) -> None:
        self._traces = traces
        self._messages: dict[str, Message] = {}
        found = [
            (number, copy, tuple(runs))
            for copy in range(copies)
            for number, trace in enumerate(traces)
            for runs in trace.threads()
        ]
        self.threads = [
            WorkedThread(number, copy, place % fronts, runs) for place, (number, copy, runs) in enumerate(found)
        ]
        self._users: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """How many threads of each front still need a message, by id."""
        for thread in self.threads:
            for name in thread.names:
                self._users[self._id(thread, name)][thread.front] += 1

    @property
    def calls(self) -> int:
        """Of all threads."""
        return sum(len(run.calls) for thread in self.threads for run in thread.runs)

    @property
    def samples(self) -> int:
        """Tokens that all calls sample."""
        return sum(call.samples for thread in self.threads for run in thread.runs for call in run.calls)

    def asked(self, thread: WorkedThread, call: TracedCall) -> AskedDecode:
        """A call of a thread."""
        decoded, made = self.message(thread, call.decoded), self.message(thread, call.made)
        return AskedDecode(call.author, decoded, made, call.header, call.samples, call.most)

    def message(self, thread: WorkedThread, name: str) -> Message:
        """A message that a thread reads or makes."""
        waiting = [name]
        while waiting:  # no recursion: a conversation may be long
            each = self._traces[thread.trace].messages[waiting[-1]]
            above = [parent for parent in each.parents if self._id(thread, parent) not in self._messages]
            if self._id(thread, each.name) in self._messages or not above:
                waiting.pop()
                self._make(thread, each.name)
            else:
                waiting.extend(above)
        return self._messages[self._id(thread, name)]

    def ended(self, thread: WorkedThread) -> Iterator[str]:
        """A thread is over: the ids of messages that no other of its front needs."""
        for name in sorted(thread.names):
            message_id = self._id(thread, name)
            users = self._users[message_id]
            users[thread.front] -= 1
            if not users[thread.front]:
                del users[thread.front]
                if not users:
                    del self._users[message_id]
                    self._messages.pop(message_id, None)
                yield message_id

    def _make(self, thread: WorkedThread, name: str) -> None:
        message_id = self._id(thread, name)
        if message_id in self._messages:
            return
        trace = self._traces[thread.trace]
        traced = trace.messages[name]
        parents = tuple(self._messages[self._id(thread, parent)] for parent in traced.parents)
        lineage = Lineage(_tokens(traced.tokens), parents, Placement((0,) * len(parents), 0))
        handle = MessageHandle(id=message_id, model=trace.header.conditions["model"], length=traced.tokens)
        self._messages[message_id] = Message(handle, lineage, None, None, _UNUSED)

    def _id(self, thread: WorkedThread, name: str) -> str:
        copy = "all" if self._traces[thread.trace].messages[name].is_common else str(thread.copy)
        return _digest(thread.trace, copy, name)


@cache
def _tokens(count: int) -> tuple[int, ...]:
    """So many tokens, whichever: nobody looks at them."""
    return (0,) * count


@cache
def _digest(trace: int, copy: str, name: str) -> str:
    return hashlib.blake2b(f"{trace} {copy} {name}".encode(), digest_size=16).hexdigest()
