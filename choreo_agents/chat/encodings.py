"""What a thread has encoded, by what it says: from there, another call of it may take an encoding, wherever its message
stood."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from choreo_agents.chat.asking import ChatRequest
from choreo_agents.chat.prompt import ChatSpan
from choreo_agents.engine import Engine, Prefill
from choreo_agents.engine.inspect import Descent
from choreo_agents.errors import HandleError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import PromptText

_MOST = 1 << 14
"""Messages remembered."""
_FEW = 64
"""With so many nobody looks which of them are gone."""
Said = tuple[str | None, PromptText]
"""What a message says, its frame told apart from its words, and the adapter that encodes it."""


@dataclass(frozen=True)
class KnownEncoding:
    """An encoding, and what the thread knows of it."""

    handle: MessageHandle
    said: frozenset[Said]
    """More than one thing, where several texts have the same tokens."""
    names: frozenset[str]
    """As which it was encoded."""


class Encodings:
    """Of one thread of one tenant. May be used from any thread of the process.

    It keeps nothing: what the thread has let go is not found any more.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, KnownEncoding] = OrderedDict()
        self._saying: dict[Said, set[str]] = {}
        self._due = _FEW
        """With how many it is looked at next which are gone."""
        self._lock = threading.Lock()

    def note(self, handle: MessageHandle, said: Said, name: str) -> None:
        """Remember what a message says, and as which it was encoded."""
        with self._lock:
            nothing = KnownEncoding(handle, frozenset(), frozenset())
            known = self._known.pop(handle.id, nothing)
            self._known[handle.id] = KnownEncoding(handle, known.said | {said}, known.names | {name})
            self._saying.setdefault(said, set()).add(handle.id)
            if len(self._known) > _MOST:
                self._drop(next(iter(self._known)))

    def saying(self, said: Said) -> list[KnownEncoding]:
        """All encodings of these words, by their ids."""
        with self._lock:
            return [self._known[name] for name in sorted(self._saying.get(said, ()))]

    def get(self, name: str) -> KnownEncoding | None:
        """What is known of a message, by its id."""
        with self._lock:
            return self._known.get(name)

    def forget(self, name: str) -> None:
        """A message is there no longer."""
        with self._lock:
            self._drop(name)

    def trim(self, engine: Engine) -> None:
        """Forget what is there no longer, whenever there are twice as many as were left the last time."""
        with self._lock:
            if len(self._known) < self._due:
                return
            handles = [known.handle for known in self._known.values()]
        gone = [handle.id for handle, tier in zip(handles, engine.kv.tiers(handles), strict=True) if tier is None]
        with self._lock:
            for name in gone:
                self._drop(name)
            self._due = max(_FEW, 2 * len(self._known))

    def _drop(self, name: str) -> None:
        known = self._known.pop(name, None)
        for said in () if known is None else known.said:
            same = self._saying[said]
            same.discard(name)
            if not same:
                del self._saying[said]


class EncodingChoice:
    """Which encodings one call may take, and which of several it takes.

    One may be taken if all that it has attended to is in the call, by what it says, or bears a name that the call
    allows. Of several: the one that was encoded behind exactly what stands before it here; then the one with the fewest
    foreign tokens among its ancestors; then with the most of what stands before it here; then with the fewest of what
    stands elsewhere; then with the smallest id.

    Args:
        engine: The tenant's.
        encodings: Of the call's thread.
        spans: All that the call is told: what each says, and its tokens.
        inherits: Names of what may be foreign.
    """

    def __init__(
        self,
        engine: Engine,
        encodings: Encodings,
        spans: Mapping[Said, Sequence[int]],
        inherits: Collection[str],
    ) -> None:
        self._engine, self._encodings = engine, encodings
        self._said = spans.keys()
        self._tokens = {tuple(tokens) for tokens in spans.values()}
        self._inherits = frozenset(inherits)
        self._descents: dict[str, Descent] = {}
        self._ancestors: dict[str, set[str]] = {}

    def choose(self, said: Said, exact: str, before: Sequence[MessageHandle]) -> MessageHandle | None:
        """The encoding of some words to take, with a lease; None: they have to be encoded.

        Args:
            said: The words.
            exact: The id of their encoding behind exactly this view.
            before: The view so far: what is in it is not taken again.
        """
        seen = {handle.id for handle in before}
        ranked = [
            ((known.handle.id != exact, foreign, -near, far, known.handle.id), known.handle)
            for known in self._encodings.saying(said)
            if known.handle.id not in seen
            for foreign, near, far in self._descent(known.handle, seen)
        ]
        ordered = (handle for _, handle in sorted(ranked, key=itemgetter(0)))
        return next(filter(self._is_leased, ordered), None)

    def _is_leased(self, handle: MessageHandle) -> bool:
        """Whether it is there to be leased, and is: whoever has it now may let it go before it is read."""
        try:
            self._engine.kv.lease([handle])
        except HandleError:
            self._encodings.forget(handle.id)
            return False
        return True

    def _descent(self, handle: MessageHandle, seen: Collection[str]) -> Iterator[tuple[int, int, int]]:
        """Tokens among its ancestors: foreign ones, those of this view, and others; nothing if it may not be taken.

        Of whose words others have encoded it is no matter here: its encoding has never attended to them.
        """
        try:
            self._descents |= self._engine.inspect.descent([handle], self._descents)
        except HandleError:
            self._encodings.forget(handle.id)
            return
        foreign = near = far = 0
        for name in self._ancestors_of(handle.id):
            ancestor, known = self._descents[name], self._encodings.get(name)
            if name in seen:
                near += len(ancestor.tokens)
            elif ancestor.tokens in self._tokens or (known is not None and not known.said.isdisjoint(self._said)):
                far += len(ancestor.tokens)
            elif known is None or not known.names & self._inherits:
                return
            else:
                foreign += len(ancestor.tokens)
        yield foreign, near, far

    def _ancestors_of(self, name: str) -> Collection[str]:
        """All that an encoding has ever attended to: each message's are put together once."""
        waiting = [name]
        while waiting:
            parents = self._descents[waiting[-1]].parents
            if unknown := [parent for parent in parents if parent not in self._ancestors]:
                waiting.append(unknown[-1])  # which has seen most of the others
                continue
            found: set[str] = set()
            for parent in reversed(parents):
                if parent not in found:
                    found |= self._ancestors[parent] | {parent}
            self._ancestors[waiting.pop()] = found
        return self._ancestors[name]


def view_anywhere(
    engine: Engine, spans: Sequence[ChatSpan], request: ChatRequest, encodings: Encodings, inherits: Sequence[str]
) -> Generator[list[Prefill], list[MessageHandle], list[MessageHandle]]:
    """Find or encode all that a call is told.

    Args:
        engine: The tenant's.
        spans: All of it. What stands around turns is encoded behind the first alone: it is nobody's.
        request: Of the call.
        encodings: Of its thread; what is encoded is noted there.
        inherits: Names of foreign messages that what is found may have attended to.
    """
    told: list[tuple[ChatSpan, Said]] = [(span, (request.adapter, span.text)) for span in spans]
    tokens = {said: tuple(engine.model.encode(span.text)) for span, said in told if span.handle is None}
    choosing, view = EncodingChoice(engine, encodings, tokens, inherits), list[MessageHandle]()
    for span, said in told:
        if span.handle is not None:
            view.append(span.handle)
            continue
        author = f"{request.agent}.{span.role}" if span.role else None
        seen = view if span.role else view[:1]
        call = Prefill(tokens[said], [*seen], author=author, adapter=request.adapter, lazy=True)
        found = None if author is None else choosing.choose(said, engine.kv.key(call).id, view)
        if found is None:
            [found] = yield [call]
        if author is not None:
            encodings.note(found, said, author)
        view.append(found)
    encodings.trim(engine)
    return view
