"""Listens to a run that is played again: gives functions their recorded results, and compares what agents say."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from langgraph.types import interrupt

from choreo_agents.engine.recording import Digests, LogitsDigests, RecordedCall, RecordedNode
from choreo_agents.errors import ReplayError
from choreo_agents.graph.recording.listening import AskedCall, Cue, Listener, NodeExecution, Returned, SaidCall
from choreo_agents.graph.recording.packing import Packing, named, resolved
from choreo_agents.graph.recording.run_recorder import CallCounter
from choreo_agents.graph.replaying.reports import ReplayedCall
from choreo_agents.graph.replaying.script import RunScript

TOOLS = "tools"
"""Among the functions that may be run: all of them."""


class RecordedFailureError(ReplayError):
    """A function failed when the run was recorded, and so it does when that is played again."""


class EndOfRecordingError(ReplayError):
    """The recording was cut, and has been played up to there."""


@dataclass(frozen=True)
class Playing:
    """How a recording is played.

    Args:
        digests: Under its key; None: that is not there.
        bits: Whether logits are compared.
        runs: The functions that may be run: names of nodes, or `TOOLS`.
    """

    digests: Digests | None
    bits: bool = False
    runs: Collection[str] = ()

    def may_run(self, node: str) -> bool:
        """Whether a function may be run."""
        return TOOLS in self.runs or node in self.runs or node.rpartition("|")[2] in self.runs


class Player:
    """Of one run. What differs is noted, and the run goes on with it.

    Args:
        script: What was recorded.
        packing: Of the graph.
        playing: How.
    """

    def __init__(self, script: RunScript, packing: Packing, playing: Playing) -> None:
        self.script, self._packing, self._playing = script, packing, playing
        self._lock = threading.Lock()
        self.calls: list[ReplayedCall] = []
        self.given = 0
        self.ran: list[str] = []
        self.compared_without_key = False

    def cue(self, asked: AskedCall) -> Cue:
        recorded = self._found(asked)
        if recorded is None:
            return Cue()
        look = LogitsDigests(self._playing.digests) if self._playing.bits and self._playing.digests else None
        tokens = recorded.tokens if self._playing.bits else None
        return Cue(seed=recorded.seed, message=recorded.message, tokens=tokens, look=look, known_as=recorded)

    def said(self, asked: AskedCall, cue: Cue, said: SaidCall) -> None:
        recorded: RecordedCall | None = cue.known_as
        words = None if asked.confidential else said.words
        if recorded is None:
            found = ReplayedCall(self.script.run.run, asked.place, None, words, "the recording has no such call")
        else:
            difference = self._difference(asked, recorded, said)
            if difference is None and isinstance(cue.look, LogitsDigests):
                difference = _first(recorded.logits or (), cue.look.found)
            found = ReplayedCall(recorded.run, asked.place, recorded.words, words, difference)
        with self._lock:
            self.calls.append(found)

    def before(self, execution: NodeExecution) -> Returned | None:
        digest = None if self._playing.digests is None else given_digest(self._playing.digests, execution)
        recorded = self.script.node(execution.place, digest)
        if self._playing.may_run(execution.node):
            return None
        if recorded is None:
            if self.script.is_open:
                raise EndOfRecordingError(f"the recording ends before {execution.node!r} returns")
            raise ReplayError(
                f"the recording has no result of {execution.node!r} in step {execution.step}: the run goes elsewhere. "
                f"Let it be run: --run {execution.node}"
            )
        return self.returned(recorded, execution)

    def returned(self, recorded: RecordedNode, execution: NodeExecution) -> Returned:
        """What was returned then; raises what was raised."""
        if recorded.outcome == "error":
            kind = "an error" if recorded.result is None else self._packing.unpacked(recorded.result)
            raise RecordedFailureError(f"{execution.node!r} failed with {kind} when it was recorded")
        if recorded.outcome == "interrupt":
            asked = [None] if recorded.result is None else self._packing.unpacked(recorded.result) or [None]
            while True:  # it asks again for all that it was answered before, and raises at what it was not
                interrupt(resolved(asked[0], execution.given, execution.state))
        if recorded.result is None:
            why = (
                "it might tell confidential words: record(path, confidential=True)"
                if recorded.masked
                else "it is of types that the graph's schemas do not name"
            )
            raise ReplayError(
                f"the result of {execution.node!r} is not in the recording, since {why}, or let it be run: "
                f"--run {execution.node}"
            )
        with self._lock:
            self.given += 1
        try:
            return Returned(resolved(self._packing.unpacked(recorded.result), execution.given, execution.state))
        except LookupError as error:
            raise ReplayError(
                f"the result of {execution.node!r} hands on message {error}, which is not there: --run {execution.node}"
            ) from None

    def inside(self, execution: NodeExecution) -> Listener:
        with self._lock:
            self.ran.append(execution.node)
        return CallCounter()

    def after(self, execution: NodeExecution, value: Any, inside: Listener) -> Any:
        return named(value, execution.config)

    def failed(self, execution: NodeExecution, error: BaseException, inside: Listener) -> None:
        pass

    def _found(self, asked: AskedCall) -> RecordedCall | None:
        digests = self._playing.digests

        def fits(recorded: RecordedCall) -> bool:
            return digests is not None and asked.digest(digests.key, recorded.seed) == recorded.request

        recorded = self.script.call(asked.place, fits)
        if recorded is None and self.script.is_open:
            raise EndOfRecordingError(f"the recording ends before {asked.author!r} speaks")
        size = asked.engine.model.adapter.vocabulary_size
        if recorded is not None and not all(0 <= token < size for token in recorded.tokens or ()):
            raise ReplayError(f"what {asked.author!r} says in the recording is damaged: its tokens are not the model's")
        return recorded

    def _difference(self, asked: AskedCall, recorded: RecordedCall, said: SaidCall) -> str | None:
        """The first between what was said then and now."""
        if recorded.tokens is not None and recorded.tokens != said.tokens:
            at = first_difference(recorded.tokens, said.tokens)
            spell = asked.engine.model.decode
            then, now = (spell(list(tokens[at : at + 8])) for tokens in (recorded.tokens, said.tokens))
            return f"token {at + 1}: recorded {then!r}, now {now!r}"
        if recorded.words is not None and recorded.words != said.words:
            return _words(recorded.words, said.words)
        if recorded.tokens is not None:
            return None
        if self._playing.digests is not None:
            if self._playing.digests.of("said", list(said.tokens)) == recorded.said:
                return None
            return "its masked words differ" if recorded.words is None else "its masked thoughts differ"
        self.compared_without_key = self.compared_without_key or recorded.words is None
        return None


def given_digest(digests: Digests, execution: NodeExecution) -> str:
    """Of a function's input."""
    return digests.of("given", execution.asked)


def first_difference(one: Any, other: Any) -> int:
    """Where two sequences that differ do so first."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _first(recorded: Any, found: Any) -> str | None:
    if tuple(recorded) == tuple(found):
        return None
    at = first_difference(recorded, found)
    if at >= min(len(recorded), len(found)):
        return f"recorded {len(recorded)} tokens, now {len(found)}"
    return f"the logits before token {at + 1}"


def _words(recorded: str, now: str) -> str:
    one, other = recorded.split(), now.split()
    at = first_difference(one, other)
    return f"word {at + 1}: recorded {' '.join(one[at : at + 6])!r}, now {' '.join(other[at : at + 6])!r}"
