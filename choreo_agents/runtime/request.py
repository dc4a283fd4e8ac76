"""One prefill or decode on its way through the engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.sampling import SampledToken, Sampler, Sampling

FinishReason = Literal["stop", "length"]
"""Why a decode has ended: by itself, with an end token, a text to stop at or an answer from a list; or cut, since it
might sample no more tokens."""


@dataclass(frozen=True)
class Binding:
    """What a request turns out to encode, settled when it is admitted."""

    view: tuple[Piece, ...]
    """Encoded tokens it attends to; their segments are pinned for it."""
    prompt: tuple[int, ...]
    """Tokens to encode before the first sample: not empty."""
    position: int
    """Of the prompt's first token."""
    arrivals: tuple[Arrival, ...] = ()
    """What of the view its first step brings into the pool."""

    def reads(self, segments: Collection[Segment]) -> bool:
        """Whether it reads any of these."""
        return any(piece.segment in segments for piece in self.view)


class Encoding(Protocol):
    """How a request reaches the model: what it can reuse and what it must encode. Called under the engine's lock.

    Who reads no other message's KV is done with what is said of that here.
    """

    def first(self, reader: Request) -> Sequence[Request]:
        """Requests that must come before it: what it reads and is nowhere any more, computed again. Each once.

        Args:
            reader: Its own request, which is charged for them if nobody was submitted before it who reads them, too.
        """
        return ()

    def awaits(self) -> Sequence[Request]:
        """Requests under way, its own or others', that compute what it reads."""
        return ()

    def ready(self) -> bool:
        """Whether it may be admitted now; False while what it reads, or could reuse, is on its way.

        Raises:
            ChoreoError: What it reads cannot be had.
        """
        ...

    def after(self) -> Sequence[Request]:
        """If it waits for nothing but requests under way: these. It may be admitted to the step that ends them."""
        return ()

    def claimed_tokens(self, counted: set[object]) -> int:
        """Room in the pool, besides its own, that admitting it would take: of what it reads and nobody keeps there.

        Args:
            counted: What requests before it have claimed already; its own is added.
        """
        return 0

    def reads(self) -> Collection[CacheEntry]:
        """What of others it keeps in the pool, or brings there, while it runs."""
        return ()

    def prompt_tokens(self) -> int:
        """How many tokens it would have to encode before the first sample, were it admitted now."""
        ...

    def pin(self, *, reuse: bool) -> tuple[int, int]:
        """Settle what it reads and pin what of it is in the pool; without `reuse`, only what it cannot do without.

        Returns:
            Tokens of room that the rest of it takes, and tokens to encode before the first sample.
        """
        ...

    def pinned_tokens(self) -> int:
        """Room in the pool that what is pinned for it takes."""
        ...

    def bind(self) -> Binding | None:
        """Bring the rest into the pool; None if there is no room for it."""
        ...

    def bound(self, segment: Segment) -> None:
        """The request has been given the segment that it will fill."""
        return

    def unpin(self) -> None:
        """Undo `pin` and `bind`, as far as that is still to be undone."""
        ...

    def close(self, request: Request) -> None:
        """The request ended. Gives back what was taken; the request's segment, too, if no message keeps it.

        Once: asked again, it does nothing.
        """
        ...


class Owner(Protocol):
    """Who asked, and what becomes of the result. Called under the engine's lock."""

    encodes_end: bool
    """Whether the last sampled token and the closing ones are encoded too, for later readers."""

    def finish(self, request: Request) -> Any:
        """Close the finished request's encoding and return the result for its callers.

        All or nothing: if it raises, nothing of it stays but what `abandon`, called next, gives back.
        """
        ...

    def abandon(self, request: Request) -> None:
        """It was cancelled, or has failed, perhaps in `finish`: close its encoding and drop what was taken for it."""
        ...


@dataclass(eq=False)
class Request:
    """A request's state; only the engine's thread changes it.

    tokens     prompt . . . | sampled . . | closing
    segment    encoded . . . . . . |          pending = the rest
    """

    number: int
    encoding: Encoding
    owner: Owner
    decoding: Decoding | None = None
    author: str | None = None
    role: str | None = None
    futures: list[Future[Any]] = field(default_factory=list)
    """Who waits for it: several if the same prefill was asked for while it was under way."""
    adapter: str = ""
    """Fingerprint of the adapter that encodes it; empty: the model alone."""
    mapper: str = ""
    """Fingerprint of the cache mapper that makes its KV of what it sees; empty: it is encoded."""
    is_foreign: bool = False
    """Whether another model has said what it encodes."""
    label: str = ""
    """What it is called in every run of the same program, whatever the words (see `StepTrace`)."""
    tenant: str = ""
    """Who may read what an error says of it."""
    priority: int = 0
    """Those with a higher one come first."""
    overtaken: int = 0
    """How many of a higher priority came after it and were put before it."""
    deadlines: dict[Future[Any], float] = field(default_factory=dict)
    """When who waits for it gives up, as `time.perf_counter` counts."""
    listeners: list[Callable[[SampledToken], None]] = field(default_factory=list)
    """Called with every sampled token, on the engine's thread; they must not raise."""
    submitted_s: float = field(default_factory=time.perf_counter)
    begun_s: float | None = None
    """When it was admitted."""
    first_token_s: float | None = None
    binding: Binding | None = None
    segment: Segment | None = None
    tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    chosen: list[SampledToken] = field(default_factory=list)
    """The sampled tokens with what else is to be known of them."""
    ended: bool = False
    again: bool = False
    """Whether memory had lost what it computes."""
    readers: list[Request] | None = None
    """Who waits to read what it computes, if that was not asked for by a call of its own."""
    charges: Counter[str] = field(default_factory=lambda: Counter(tokens_encoded=0))
    """Tokens that steps have encoded for it, as they are counted: its own, and those of messages that somebody had to
    encode for it. Every token that the engine encodes is charged to one request."""
    for_others: Counter[Segment] = field(default_factory=Counter)
    """How many of these stand in messages other than its own, by where their KV is."""
    reused_elsewhere: int = 0
    beyond_elsewhere: int = 0
    """The same as `reused` and `beyond`, if another engine ran it."""
    over: bool = False
    """Whether it was finished or dropped."""
    handed_over: bool = False
    """Whether the pin that came with its segment is somebody else's."""
    _watched: set[Future[Any]] = field(default_factory=set)
    """Of those who wait: whose cancelling is told of."""

    def begin(self, binding: Binding, segment: Segment) -> None:
        """It is admitted: what it encodes is settled, and has a place."""
        self.binding, self.segment, self.tokens = binding, segment, list(binding.prompt)
        self.begun_s = time.perf_counter()
        self.ended = self.decoding is None
        if self.decoding is not None and self.decoding.is_silent:
            self._end(self.decoding)
        self.encoding.bound(segment)
        if self.decoding is not None and self.decoding.known is not None and not self.ended:
            self._say(self.decoding, self.decoding.known)

    def _say(self, decoding: Decoding, known: Sequence[int]) -> None:
        """It says what was said before: no step has to sample that."""
        for token in known:
            chosen = SampledToken(token)
            for listener in self.listeners if self.take(chosen) else ():
                listener(chosen)
            if self.ended:
                return
        self._end(decoding)

    def hand_over(self) -> Segment | None:
        """Its segment with the pin that came with it, once: who takes it keeps it or gives it back."""
        if self.handed_over:
            return None
        self.handed_over = True
        return self.segment

    def give_back(self, pool: KVPool) -> None:
        """Close its encoding, and let go of its segment unless somebody has taken that over."""
        self.encoding.close(self)
        segment = self.hand_over()
        if segment is not None:
            pool.unpin(segment)

    @property
    def kind(self) -> Literal["prefill", "decode"]:
        return "prefill" if self.decoding is None else "decode"

    @property
    def encoded(self) -> int:
        return 0 if self.segment is None else self.segment.encoded

    @property
    def pending(self) -> int:
        """Tokens known but not yet encoded."""
        return len(self.tokens) - self.encoded

    @property
    def reused(self) -> int:
        """Tokens that it attends to and was not charged for; none if what it computes was asked for by readers only."""
        if self.binding is None or self.readers or (self.again and self.readers is not None):
            return 0
        return sum(piece.count for piece in self.binding.view) - self._paid_in_view() + self.reused_elsewhere

    @property
    def beyond(self) -> int:
        """Tokens that it was charged for and that stand in messages which its view does not hold.

        Those that its parents had attended to.
        """
        return sum(self.for_others.values()) - self._paid_in_view() + self.beyond_elsewhere

    def _paid_in_view(self) -> int:
        """Tokens that it was charged for in messages which its view holds."""
        held = set() if self.binding is None else {piece.segment for piece in self.binding.view}
        return sum(tokens for segment, tokens in self.for_others.items() if segment in held)

    def advance(self, tokens: int) -> None:
        """A step has encoded so many more tokens of it: somebody is charged for them."""
        segment, binding = self.segment, self.binding
        if segment is None or binding is None or segment.encoded + tokens > segment.capacity:
            raise KVMemoryError(f"a request encoded {tokens} tokens more than it has room for")
        segment.encoded += tokens
        billed_request = self.billed_request() if self.readers else self
        for name in self.counted_as:
            billed_request.charges[name] += tokens
        if billed_request is not self:
            billed_request.for_others[segment] += tokens

    @cached_property
    def counted_as(self) -> tuple[str, ...]:
        """What tokens that it encodes are, as fields of `Counters`."""
        if self.again or self.mapper:
            return ("tokens_recomputed" if self.again else "tokens_mapped",)
        return ("tokens_encoded", "tokens_of_other_models") if self.is_foreign else ("tokens_encoded",)

    def billed_request(self) -> Request:
        """Of all calls that wait for it, or for what waits for it, the first submitted; itself, if there is none."""
        calls: list[Request] = []
        seen: set[Request] = {self}
        queue: list[Request] = [self]
        for request in queue:
            waiting = [reader for reader in request.readers or () if not reader.over]
            if not waiting:
                calls.append(request)
            for reader in waiting:
                if reader not in seen:
                    seen.add(reader)
                    queue.append(reader)
        return min(calls, key=lambda call: (call.readers is not None, call.number))

    def reads_unencoded_of(self, other: Request) -> bool:
        """Whether it has begun to read what another, which has not encoded all of it, was to encode."""
        segment, view = other.segment, () if self.binding is None else self.binding.view
        if segment is None or segment.pins < 2:
            return False
        return any(piece.segment is segment and piece.first + piece.count > segment.encoded for piece in view)

    def room(self) -> int:
        """Tokens of KV that it can need at most, were it admitted now."""
        return self.encoding.prompt_tokens() + (0 if self.decoding is None else self.decoding.longest)

    def cancelled(self) -> bool:
        return all(future.cancelled() for future in self.futures)

    def tell_cancelled(self, tell: Callable[[], None]) -> None:
        """Have it told, on whatever thread, when somebody who waits now cancels; each is asked once."""
        for future in self.futures:
            if future not in self._watched:
                self._watched.add(future)
                future.add_done_callback(lambda done: tell() if done.cancelled() else None)

    def late(self, now: float) -> list[Future[Any]]:
        """Who waited long enough; they are forgotten."""
        if not self.deadlines:
            return []
        gone = [future for future, deadline in self.deadlines.items() if deadline <= now]
        for future in gone:
            del self.deadlines[future]
            self.futures.remove(future)
        return gone

    def take(self, chosen: SampledToken) -> bool:
        """Append a sampled token, and the closing ones if it was the last; whether it is part of the message."""
        decoding, token, sampled = self.decoding, chosen.token, self.sampled
        assert decoding is not None and not self.ended
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()
        self.chosen.append(chosen)
        sampled.append(token)
        self.tokens.append(token)
        decoding.sampler.take(token)
        if not decoding.ends(sampled):
            return True
        is_said = not decoding.leaves_out_last(sampled)
        if not is_said:
            del self.chosen[-1], sampled[-1], self.tokens[-1]
        self._end(decoding)
        return is_said

    def _end(self, decoding: Decoding) -> None:
        """Nothing more is sampled: what is missing of the closing follows."""
        self.ended = True
        self.tokens.extend(decoding.missing_end(self.sampled))

    def done(self) -> bool:
        """Whether nothing is left to sample or, where later readers need it, to encode."""
        prompt = 0 if self.binding is None else len(self.binding.prompt)
        return self.ended and (self.pending == 0 or (self.encoded >= prompt and not self.owner.encodes_end))


@dataclass
class Decoding:
    """The part of a request that samples: when it ends, and what of what it sampled is the message."""

    sampling: Sampling
    sampler: Sampler
    stop_tokens: frozenset[int]
    turn_suffix: tuple[int, ...]
    """Tokens that the message ends with, whether the model produces them or not."""
    stop_text: Callable[[int], bool] | None = None
    """Told every sampled token, in order: whether a text to stop at is complete with it."""
    left_out: frozenset[int] = frozenset()
    """Tokens that end the decode and are no part of the message, unless they begin what closes it."""
    closes: frozenset[int] = frozenset()
    """Tokens that close the message in the place of the usual."""
    thoughts: int = 0
    """How many of tokens that are forced come before the answer."""
    complete: bool = False
    """Whether tokens that are forced are an answer that a constraint ends, however many there may be."""
    known: tuple[int, ...] | None = None
    """What it says, if that is known before: it is encoded as a prompt is. None: it samples."""
    seed: int = 0
    """Of its sampler."""
    cut: bool = False
    """Whether it has ended since it may sample no more tokens, and not by itself."""
    _is_plain: bool = field(init=False)
    """Whether nothing but an end token or its length ends it."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        led = sampling.forced_token_ids is not None or self.sampler.constraint is not None or self.stop_text is not None
        self._is_plain = not (led or self.complete or sampling.choices or self.thoughts)

    @property
    def longest(self) -> int:
        """Tokens that it can add at most, closing ones included."""
        constraint = self.sampler.constraint
        return (self.sampling.longest if constraint is None else constraint.longest) + len(self.turn_suffix)

    def ends(self, sampled: list[int]) -> bool:
        """Whether these are all the tokens to sample; asked once after each."""
        if self._is_plain:
            is_end = sampled[-1] in self.stop_tokens
            is_full = len(sampled) >= self.sampling.max_tokens
            self.cut = is_full and not is_end
            return is_end or is_full
        sampling, constraint = self.sampling, self.sampler.constraint
        forced = sampling.forced_token_ids
        if forced is None and constraint is not None:
            self.cut = constraint.cut
            return constraint.done
        stopped = self.stop_text is not None and self.stop_text(sampled[-1])
        stopped = stopped or sampled[-1] in self.stop_tokens
        is_full = len(sampled) - self.thoughts >= sampling.max_tokens
        # What is chosen from a list is never cut.
        self.cut = is_full and not (stopped or self.complete or sampling.choices)
        return len(sampled) == len(forced) if forced is not None else stopped or is_full

    @property
    def finish_reason(self) -> FinishReason:
        """Why it has ended, once it has."""
        return "length" if self.cut else "stop"

    @property
    def is_silent(self) -> bool:
        """Whether it samples nothing: the message is its header, and what closes it."""
        return self.sampling.forced_token_ids is not None and not self.sampling.forced_token_ids

    def leaves_out_last(self, sampled: list[int]) -> bool:
        """Whether the last of all sampled tokens only says that the model is done, in a way that its turn does not."""
        if self.sampling.forced_token_ids is not None or sampled[-1] not in self.left_out:
            return False
        return self.missing_end(sampled) == self.turn_suffix

    def missing_end(self, sampled: list[int]) -> tuple[int, ...]:
        """The closing tokens that the model has not produced itself."""
        if sampled and sampled[-1] in self.closes:
            return ()
        for have in range(min(len(self.turn_suffix), len(sampled)), 0, -1):
            if tuple(sampled[-have:]) == self.turn_suffix[:have]:
                return self.turn_suffix[have:]
        return self.turn_suffix
