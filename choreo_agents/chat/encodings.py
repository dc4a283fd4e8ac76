"""Index of a thread's encoded messages by content, for `reuse="anywhere"`: a later call may reposition their KV."""

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
"""Maximum number of messages in the index."""
_FEW = 64
"""Size up to which evicted messages are not looked for."""
Content = tuple[str | None, PromptText]
"""The adapter that encodes a message, and its text, in which control tokens are marked."""


@dataclass(frozen=True)
class KnownEncoding:
    """An encoded message of the index."""

    handle: MessageHandle
    texts: frozenset[Content]
    """Its contents: several if different texts have the same tokens."""
    names: frozenset[str]
    """Authors under which it was encoded."""


class Encodings:
    """Index of the encoded messages of one thread of one tenant; thread-safe.

    It holds no leases: an evicted message is no longer found.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, KnownEncoding] = OrderedDict()
        self._by_content: dict[Content, set[str]] = {}
        self._due = _FEW
        """Size at which evicted messages are next looked for."""
        self._lock = threading.RLock()

    def note(self, handle: MessageHandle, content: Content, name: str) -> None:
        """Add a message with its content and author."""
        with self._lock:
            encoding = self._known.pop(handle.id, KnownEncoding(handle, frozenset(), frozenset()))
            self._known[handle.id] = KnownEncoding(handle, encoding.texts | {content}, encoding.names | {name})
            self._by_content.setdefault(content, set()).add(handle.id)
            if len(self._known) > _MOST:
                self.forget(next(iter(self._known)))

    def with_content(self, content: Content) -> list[KnownEncoding]:
        """Return all encodings of a content, ordered by id."""
        with self._lock:
            return [self._known[name] for name in sorted(self._by_content.get(content, ()))]

    def get(self, name: str) -> KnownEncoding | None:
        """Return the entry of a message id."""
        with self._lock:
            return self._known.get(name)

    def forget(self, name: str) -> None:
        """Remove an evicted message."""
        with self._lock:
            encoding = self._known.pop(name, None)
            for content in () if encoding is None else encoding.texts:
                same = self._by_content[content]
                same.discard(name)
                if not same:
                    del self._by_content[content]

    def trim(self, engine: Engine) -> None:
        """Remove evicted messages, whenever the index has doubled since the last time (amortized constant cost)."""
        with self._lock:
            if len(self._known) < self._due:
                return
            handles = [encoding.handle for encoding in self._known.values()]
        evicted = [handle.id for handle, tier in zip(handles, engine.kv.tiers(handles), strict=True) if tier is None]
        with self._lock:
            for name in evicted:
                self.forget(name)
            self._due = max(_FEW, 2 * len(self._known))


class EncodingChoice:
    """Policy of one call: which encodings it may reuse, and which of several it prefers.

    An encoding may be reused if the content of everything that it attended to is in the call, or bears an inherited
    name. Of several, the call takes the one that was encoded behind exactly this view; then the one with the fewest
    foreign tokens among its ancestors; with the most tokens of this view; with the fewest of later messages of the
    call; with the smallest id.

    Args:
        engine: Engine of the tenant.
        encodings: Index of the call's thread.
        spans: Tokens of each content in the call.
        inherits: Names that foreign ancestors may bear.
    """

    def __init__(
        self,
        engine: Engine,
        encodings: Encodings,
        spans: Mapping[Content, Sequence[int]],
        inherits: Collection[str],
    ) -> None:
        self._engine, self._encodings = engine, encodings
        self._texts = spans.keys()
        self._tokens = {tuple(tokens) for tokens in spans.values()}
        self._inherits = frozenset(inherits)
        self._descents: dict[str, Descent] = {}
        self._ancestors: dict[str, set[str]] = {}

    def choose(self, content: Content, exact: str, before: Sequence[MessageHandle]) -> MessageHandle | None:
        """Lease and return the preferred encoding of a content; None: it has to be encoded.

        Args:
            content: The content.
            exact: Id of its encoding behind exactly this view.
            before: The view so far: none of its messages is taken again.
        """
        in_view = {handle.id for handle in before}
        ranked = [
            ((encoding.handle.id != exact, foreign, -near, far, encoding.handle.id), encoding.handle)
            for encoding in self._encodings.with_content(content)
            if encoding.handle.id not in in_view
            for foreign, near, far in self._descent(encoding.handle, in_view)
        ]
        ordered = (handle for _, handle in sorted(ranked, key=itemgetter(0)))
        return next(filter(self._is_leased, ordered), None)

    def _is_leased(self, handle: MessageHandle) -> bool:
        """Lease a handle, and return whether it still exists: its present holder may release it before it is read."""
        try:
            self._engine.kv.lease([handle])
        except HandleError:
            self._encodings.forget(handle.id)
            return False
        return True

    def _descent(self, handle: MessageHandle, in_view: Collection[str]) -> Iterator[tuple[int, int, int]]:
        """Yield the numbers of its ancestors' tokens: foreign, in this view, elsewhere in the call.

        Yields nothing if a foreign ancestor has no inherited name: the encoding may not be reused.
        """
        try:
            self._descents |= self._engine.inspect.descent([handle], self._descents)
        except HandleError:
            self._encodings.forget(handle.id)
            return
        foreign = near = far = 0
        for name in self._ancestors_of(handle.id):
            ancestor, known = self._descents[name], self._encodings.get(name)
            if name in in_view:
                near += len(ancestor.tokens)
            elif ancestor.tokens in self._tokens or (known is not None and not known.texts.isdisjoint(self._texts)):
                far += len(ancestor.tokens)
            elif known is None or not known.names & self._inherits:
                return
            else:
                foreign += len(ancestor.tokens)
        yield foreign, near, far

    def _ancestors_of(self, name: str) -> Collection[str]:
        """Return the ids of all that an encoding attended to, directly or not; memoized, without recursion."""
        waiting = [name]
        while waiting:
            parents = self._descents[waiting[-1]].parents
            if unknown := [parent for parent in parents if parent not in self._ancestors]:
                waiting.append(unknown[-1])  # the last parent attended to most of the others
                continue
            ancestors: set[str] = set()
            for parent in reversed(parents):
                if parent not in ancestors:
                    ancestors |= self._ancestors[parent] | {parent}
            self._ancestors[waiting.pop()] = ancestors
        return self._ancestors[name]


def view_anywhere(
    engine: Engine, spans: Sequence[ChatSpan], request: ChatRequest, encodings: Encodings, inherits: Sequence[str]
) -> Generator[list[Prefill], list[MessageHandle], list[MessageHandle]]:
    """Build the view of a call: reuse or encode each span. Yields prefills, and returns the handles.

    Args:
        engine: Engine of the tenant.
        spans: The prompt. Text between turns has no author and is encoded behind the first span only.
        request: Options of the call.
        encodings: Index of the thread, to which new messages are added.
        inherits: Names of foreign messages that reused ones may have attended to.
    """
    contents: list[tuple[ChatSpan, Content]] = [(span, (request.adapter, span.text)) for span in spans]
    tokens = {content: tuple(engine.model.encode(span.text)) for span, content in contents if span.handle is None}
    choice, view = EncodingChoice(engine, encodings, tokens, inherits), list[MessageHandle]()
    for span, content in contents:
        if span.handle is not None:
            view.append(span.handle)
            continue
        author = f"{request.agent}.{span.role}" if span.role else None
        parents = view if span.role else view[:1]
        call = Prefill(tokens[content], [*parents], author=author, adapter=request.adapter, lazy=True)
        handle = None if author is None else choice.choose(content, engine.kv.key(call).id, view)
        if handle is None:
            [handle] = yield [call]
        if author is not None:
            encodings.note(handle, content, author)
        view.append(handle)
    encodings.trim(engine)
    return view
