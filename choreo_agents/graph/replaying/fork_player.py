"""Listens to a run that is forked: what is as recorded is taken, and all else computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from choreo_agents.engine.recording import RecordedCall, RecordedNode
from choreo_agents.errors import ReplayError
from choreo_agents.graph.recording.listening import AskedCall, Cue, NodeExecution, Returned, SaidCall
from choreo_agents.graph.recording.packing import Packing
from choreo_agents.graph.replaying.player import EndOfRecordingError, Player, Playing, given_digest
from choreo_agents.graph.replaying.reports import ForkedCall
from choreo_agents.graph.replaying.script import RunScript
from choreo_agents.models import FramedText


class ForkPlayer(Player):
    """Of one run.

    Args:
        script: As for `Player`; `packing` and `playing` likewise.
        packing: Of the graph.
        playing: How.
        kept: Whether a line is of before the place: a call is said as it was, whatever it sees.
        words: What is said in the place of recorded calls, by their `id()`.
        reseeded: Whether derived seeds are others.
    """

    def __init__(
        self,
        script: RunScript,
        packing: Packing,
        playing: Playing,
        *,
        kept: Callable[[RecordedCall | RecordedNode], bool],
        words: Mapping[int, str],
        reseeded: bool,
    ) -> None:
        super().__init__(script, packing, playing)
        self._kept, self._words, self._reseeded = kept, words, reseeded
        self._forked: list[tuple[ForkedCall, int]] = []
        self.made: list[tuple[str, int]] = []
        """The nodes that have run, each with its superstep."""
        self.taken = 0
        """Tokens."""
        self.masked: set[str] = set()
        """Whose recorded words would have been taken, had they not been masked."""

    def cue(self, asked: AskedCall) -> Cue:
        with self._lock:
            self.made.append((asked.author, asked.step))
        recorded = self._found(asked)
        if recorded is None:
            return Cue()
        seed = None if self._reseeded and not self._kept(recorded) else recorded.seed
        cue = Cue(seed=seed, message=recorded.message, known_as=recorded)
        if (said := self._words.get(id(recorded))) is not None:
            tokens = asked.engine.model.encode(FramedText.words(asked.lead + said))
            return Cue(seed=seed, message=recorded.message, replaces=tuple(tokens), at_once=True, known_as=recorded)
        if not self._kept(recorded) and self._digest(asked, seed) != recorded.request:
            return cue
        if recorded.tokens is None:
            with self._lock:
                self.masked.add(asked.author)
            return cue
        return Cue(seed=seed, message=recorded.message, tokens=recorded.tokens, at_once=True, known_as=recorded)

    def said(self, asked: AskedCall, cue: Cue, said: SaidCall) -> None:
        recorded: RecordedCall | None = cue.known_as
        words = None if asked.confidential else said.words
        sampled = 0 if cue.at_once else len(said.tokens)
        outcome: Any = "new"
        if recorded is not None and cue.replaces is not None:
            outcome = "set"
        elif recorded is not None and cue.at_once:
            outcome = "taken"
        elif recorded is not None:
            outcome = "same" if self._difference(asked, recorded, said) is None else "changed"
        then = None if recorded is None else recorded.words
        call = ForkedCall(self.script.run.run, asked.place, outcome, then, words, sampled)
        with self._lock:
            self.taken += len(said.tokens) if outcome == "taken" else 0
            self._forked.append((call, asked.superstep))

    def before(self, execution: NodeExecution) -> Returned | None:
        assert self._playing.digests is not None
        with self._lock:
            self.made.append((execution.node, execution.step))
        given = given_digest(self._playing.digests, execution)
        recorded = self.script.node(execution.place, given)
        is_same = recorded is not None and recorded.given == given
        # What agents said that it has called itself depends on the seed, which is no part of its input.
        redrawn = recorded is not None and recorded.calls > 0 and self._reseeded and not self._kept(recorded)
        if recorded is not None and is_same and not redrawn and (recorded.result is not None or not recorded.masked):
            return self.returned(recorded, execution)
        if self._playing.may_run(execution.node):
            return None
        if recorded is None and self.script.is_open:
            raise EndOfRecordingError(f"the recording ends before {execution.node!r} returns")
        why = "is not as recorded"
        if recorded is None:
            why = "is not in the recording"
        elif redrawn:
            why = "is another seed, too, since it calls agents itself"
        elif is_same:
            why = "is as recorded, and its result is masked"
        raise ReplayError(
            f"the function {execution.node!r} would have to be run: its input in step {execution.step} {why}. Let it "
            f"be run with --run {execution.node}, or all with --run tools"
        )

    def said_calls(self) -> list[ForkedCall]:
        """In the order of supersteps."""
        return [call for call, _ in sorted(self._forked, key=lambda found: (found[1], found[0].place))]

    def gone(self) -> list[RecordedCall]:
        """What was said then, and is not now."""
        return [] if self.script.is_open else self.script.unused()

    def _digest(self, asked: AskedCall, seed: int | None) -> str:
        assert self._playing.digests is not None
        return asked.digest(self._playing.digests.key, seed)
