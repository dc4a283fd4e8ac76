"""The answers of a record, given to the calls of one of its runs that is made again."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langgraph.errors import GraphInterrupt

from choreo_agents.engine.recording.format import RecordedCall, RecordedMessage, Recording, RunStarted
from choreo_agents.engine.recording.recorder import Digests
from choreo_agents.errors import ReplayError
from choreo_agents.graph.recording.listening import Answer, AskedCall, SaidCall
from choreo_agents.graph.replaying.reports import ReplayedCall
from choreo_agents.models import FramedText

Request = tuple[tuple[str, str], ...]


class EndOfRecord(GraphInterrupt):
    """The record was cut, and the run was made again up to there."""


@dataclass(frozen=True)
class _Match:
    """What the record has of a call."""

    request: Mapping[str, str]
    recorded: RecordedCall | None
    """The call in its place."""
    found: RecordedCall | None
    """One that was asked the same: that, if it was."""


class RunAnswers:
    """Of one run. May be used from any thread.

    Args:
        recording: The record.
        run: Of its runs.
        digests: Under its key.
        words: What is said in the place of recorded calls, by their `id()`.
    """

    def __init__(self, recording: Recording, run: RunStarted, digests: Digests, words: Mapping[int, str]) -> None:
        own, self.ended = recording.calls(run.run), recording.ended(run.run)
        self._run, self._digests, self._words = run.run, digests, words
        self._by_request = defaultdict[Request, list[RecordedCall]](list)
        for each in [*own, *(call for call in recording.calls() if call.run != run.run)]:
            self._by_request[_request(each.asked)].append(each)
        self._authors = {each.name: each.author for each in recording.lines if isinstance(each, RecordedMessage)}
        self._lock = threading.Lock()
        self._left = [*own]
        self._matched: dict[int, _Match] = {}
        """Of calls under way, by their `id()`."""
        self.is_cut = False
        """Whether the run has come to the end of what the record has of it."""
        self.calls: list[ReplayedCall] = []
        self.taken = 0
        """Tokens."""
        self.masked: set[str] = set()
        """Whose answers the record would have, were they not masked."""

    @property
    def is_open(self) -> bool:
        """Whether more may have happened than the record has: its process ended, or nobody took all that it gave."""
        return self.ended is None or self.ended.outcome == "left"

    @property
    def gone(self) -> list[RecordedCall]:
        """What was said then, and was not asked for now."""
        return [] if self.is_open else self._left

    def answer(self, asked: AskedCall) -> Answer | None:
        """What a call says."""
        match = self._matched[id(asked)] = self._match(asked)
        recorded, found = match.recorded, match.found
        if recorded is not None and (words := self._words.get(id(recorded))) is not None:
            return Answer(tuple(asked.engine.model.encode(FramedText.words(asked.lead + words))), is_set=True)
        if found is None or found.tokens is None:
            return None
        size = asked.engine.model.adapter.vocabulary_size
        is_theirs = all(0 <= token < size for token in found.tokens)
        if not is_theirs or self._digests.of("said", list(found.tokens)) != found.said:
            raise ReplayError(f"what {asked.author!r} says in the record is damaged: its tokens are not the model's")
        return Answer(found.tokens, found.is_set)

    def _match(self, asked: AskedCall) -> _Match:
        request = asked.request(self._digests)
        with self._lock:
            same = self._by_request.get(_request(request), [])
            here = [each for each in self._left if each.place == asked.place]
            # Calls in branches of a subgraph, and of one function, have one place.
            recorded = next((each for each in here if each in same), here[0] if here else None)
            if self.is_open and recorded is None:
                self.is_cut = True
            if self.is_cut:
                raise EndOfRecord(())
            found = recorded if recorded in same else next((each for each in same if not each.is_set), None)
            self._left = [each for each in self._left if each is not recorded]
        return _Match(request, recorded, found)

    def said(self, asked: AskedCall, said: SaidCall) -> None:
        """Compare what a call has said with the record."""
        match = self._matched.pop(id(asked))
        recorded, is_set = (
            match.found or match.recorded,
            match.recorded is not None and id(match.recorded) in self._words,
        )
        outcome: Any = "new"
        if is_set:
            recorded, outcome = match.recorded, "set"
        elif said.answer is not None:
            outcome = "taken" if said.tokens == said.answer.tokens else "changed"
        elif recorded is not None:
            is_same = self._digests.of("said", list(said.tokens)) == recorded.said
            outcome = "same" if is_same else "changed"
        call = ReplayedCall(
            self._run,
            asked.place,
            outcome,
            () if is_set or match.found or recorded is None else tuple(self._differs(asked, match.request, recorded)),
            None if recorded is None else recorded.words,
            None if asked.confidential else said.words,
            0 if said.answer is not None else len(said.tokens),
        )
        with self._lock:
            self.calls.append(call)
            self.taken += len(said.tokens) if outcome == "taken" else 0
            if not is_set and match.found is not None and match.found.tokens is None:
                self.masked.add(asked.author)

    def _differs(self, asked: AskedCall, request: Mapping[str, str], recorded: RecordedCall) -> list[str]:
        """What of a call's request is not as it was."""
        differs = [name for name in request if request[name] != recorded.asked.get(name)]
        digests = asked.engine.record.digests(self._digests.key)
        now = {digests.name(each): each.author for each in asked.engine.record.messages(asked.handles)}
        then = {name: self._authors.get(name) for name in recorded.reads}
        others = {author for name, author in [*now.items(), *then.items()] if name not in now or name not in then}
        named = sorted(author for author in others if author)
        told = f"view ({', '.join(named)})" if named else "view"
        return [told if name == "view" else name for name in differs]


def _request(asked: Mapping[str, str]) -> Request:
    return tuple(sorted(asked.items()))
