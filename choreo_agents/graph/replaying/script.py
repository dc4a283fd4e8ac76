"""One recorded run as whoever plays it again asks for it: what was said, and what was returned, in which place."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from choreo_agents.engine.recording import RecordedCall, RecordedNode, Recording, RunStarted

L = TypeVar("L", RecordedCall, RecordedNode)


class RunScript:
    """Each line is given out once. May be used from any thread.

    Args:
        recording: Which.
        run: Of its runs.
    """

    def __init__(self, recording: Recording, run: RunStarted) -> None:
        self.run, self.ended = run, recording.ended(run.run)
        self.calls, self.nodes = recording.calls(run.run), recording.nodes(run.run)
        self._calls, self._nodes = _by_place(self.calls), _by_place(self.nodes)
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether more may have happened than it has: its process ended, or nobody took all that it gave."""
        return self.ended is None or self.ended.outcome == "left"

    def call(self, place: tuple[str, int, int, int], fits: Callable[[RecordedCall], bool]) -> RecordedCall | None:
        """What was said in a place; of several, as branches of subgraphs have it, the first that fits."""
        return self._taken(self._calls, place, fits)

    def node(self, place: tuple[str, int, int], given: str | None) -> RecordedNode | None:
        """What was returned in a place, preferably to an input with this digest. Attempts that failed before another
        did not are left out."""

        def fits(node: RecordedNode) -> bool:
            return node.given == given and node.outcome != "error"

        with self._lock:
            left = self._nodes.get(place, [])
            if any(each.outcome == "result" for each in left):
                while left[0].outcome == "error":
                    left.pop(0)
        return self._taken(self._nodes, place, fits)

    def unused(self) -> list[RecordedCall]:
        """What was said and nobody has asked for."""
        with self._lock:
            left = {id(call) for calls in self._calls.values() for call in calls}
        return [call for call in self.calls if id(call) in left]

    def _taken(self, lines: Mapping[Hashable, list[L]], place: Hashable, fits: Callable[[L], bool]) -> L | None:
        with self._lock:
            left = lines.get(place, [])
            if not left:
                return None
            found = next((each for each in left if fits(each)), left[0]) if len(left) > 1 else left[0]
            left.remove(found)
            return found


def _by_place(lines: Sequence[L]) -> Mapping[Hashable, list[L]]:
    found: defaultdict[Hashable, list[L]] = defaultdict(list)
    for line in lines:
        found[line.place].append(line)
    return dict(found)
