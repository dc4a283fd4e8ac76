"""A prefill or decode on its way through the engine."""

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
"""Why a decode has ended: `stop` for an end token, a stop text or an answer from a list; `length` if it was cut because
it might sample no more tokens."""


@dataclass(frozen=True)
class Binding:
    """A request's view and prompt, settled when it is admitted."""

    view: tuple[Piece, ...]
    """Encoded tokens it attends to; their segments are pinned for it."""
    prompt: tuple[int, ...]
    """Tokens to encode before the first sample: not empty."""
    position: int
    """Position of the prompt's first token."""
    arrivals: tuple[Arrival, ...] = ()
    """KV of the view that its first step brings into the pool."""

    def reads(self, segments: Collection[Segment]) -> bool:
        """Return whether it reads any of these segments."""
        return any(piece.segment in segments for piece in self.view)


class Encoding(Protocol):
    """Decides what a request can reuse and what it must encode. Called under the engine's lock.

    The defaults suit an encoding that reads no other message's KV.
    """

    def first(self, reader: Request) -> Sequence[Request]:
        """Return requests that must run before it: each recomputes something that it reads and that is lost. Each once.

        Args:
            reader: Its own request, which is charged for them unless an earlier request reads them, too.
        """
        return ()

    def awaits(self) -> Sequence[Request]:
        """Return unfinished requests, its own or others', that compute what it reads."""
        return ()

    def ready(self) -> bool:
        """Return whether it may be admitted now; False while what it reads, or could reuse, is being computed or
        fetched.

        Raises:
            ChoreoError: What it reads cannot be provided.
        """
        ...

    def after(self) -> Sequence[Request]:
        """Return the requests that it may share a step with, in which they end; none if it waits for anything else."""
        return ()

    def claimed_tokens(self, counted: set[object]) -> int:
        """Return the memory, besides its own, that admitting it would take in the pool for what it reads, in tokens.

        Args:
            counted: What earlier requests have claimed already; its own claims are added.
        """
        return 0

    def reads(self) -> Collection[CacheEntry]:
        """Return the entries of other messages that it keeps in the pool, or brings there, while it runs."""
        return ()

    def prompt_tokens(self) -> int:
        """Return the number of tokens it would have to encode before the first sample, were it admitted now."""
        ...

    def pin(self, *, reuse: bool) -> tuple[int, int]:
        """Settle what it reads and pin what is in the pool; without `reuse`, only what it cannot do without.

        Returns:
            Tokens of memory that the rest of it takes, and tokens to encode before the first sample.
        """
        ...

    def pinned_tokens(self) -> int:
        """Return the tokens of memory that its pinned segments take."""
        ...

    def bind(self) -> Binding | None:
        """Bring the rest into the pool; return None if there is no memory for it."""
        ...

    def bound(self, segment: Segment) -> None:
        """Accept the segment that the request will fill."""
        return

    def unpin(self) -> None:
        """Undo `pin` and `bind`, as far as that is still to be undone."""
        ...

    def close(self, request: Request) -> None:
        """End the encoding: release what was taken, and the request's segment unless a message keeps it.

        Idempotent.
        """
        ...


class Owner(Protocol):
    """Submitter of a request, which turns its end into a result. Called under the engine's lock."""

    def finish(self, request: Request) -> Any:
        """Close the finished request's encoding and return the result for its callers.

        All or nothing: if it raises, nothing stays but what `abandon`, called next, releases.
        """
        ...

    def abandon(self, request: Request) -> None:
        """Close the encoding of a request that was cancelled or failed, perhaps in `finish`, and drop what was taken
        for it."""
        ...


@dataclass(eq=False)
class Request:
    """State of a request; only the engine's thread changes it.

    tokens     prompt . . . | sampled . . | turn suffix
    segment    encoded . . . . . . |          pending = the rest
    """

    number: int
    encoding: Encoding
    owner: Owner
    decoding: Decoding | None = None
    author: str | None = None
    role: str | None = None
    futures: list[Future[Any]] = field(default_factory=list)
    """Futures of its callers: several if the same prefill was submitted again while it ran."""
    adapter: str = ""
    """Fingerprint of the adapter that encodes it; empty: the base model."""
    mapper: str = ""
    """Fingerprint of the cache mapper that computes its KV from its view's; empty: it is encoded."""
    is_foreign: bool = False
    """Whether it encodes text that another model generated."""
    label: str = ""
    """Name that is the same in every run of the program, whatever the text (see `StepTrace`)."""
    tenant: str = ""
    """Tenant whose request it is; only that one may read its details in errors."""
    encodes_end: bool = True
    """Whether the last sampled token and the turn suffix are encoded too, for later readers."""
    priority: int = 0
    """Priority; higher ones come first."""
    overtaken: int = 0
    """Number of later requests with a higher priority that were queued before it."""
    deadlines: dict[Future[Any], float] = field(default_factory=dict)
    """Deadlines of its callers, in seconds of `time.perf_counter`."""
    listeners: list[Callable[[SampledToken], None]] = field(default_factory=list)
    """Callbacks for every sampled token, on the engine's thread; they must not raise."""
    submitted_s: float = field(default_factory=time.perf_counter)
    begun_s: float | None = None
    """Time of admission."""
    first_token_s: float | None = None
    binding: Binding | None = None
    segment: Segment | None = None
    tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    chosen: list[SampledToken] = field(default_factory=list)
    """Sampled tokens with their log-probabilities."""
    ended: bool = False
    again: bool = False
    """Whether it recomputes KV that memory had lost."""
    readers: list[Request] | None = None
    """Requests that wait to read what it computes, if no call of its own submitted it; else None."""
    charges: Counter[str] = field(default_factory=lambda: Counter(tokens_encoded=0))
    """Tokens encoded on its behalf, by counter: its own, and those of messages that had to be encoded for it. Every
    token that the engine encodes is charged to one request."""
    for_others: Counter[Segment] = field(default_factory=Counter)
    """Of these, the tokens in other messages, by segment."""
    reused_elsewhere: int = 0
    beyond_elsewhere: int = 0
    """Additions to `reused` and `beyond` if another engine ran it."""
    over: bool = False
    """Whether it was finished or dropped."""
    handed_over: bool = False
    """Whether the pin that came with its segment was passed on."""
    stop: Callable[[], object] | None = None
    """Stops the remote engine that runs it; called when it is dropped."""
    _watched: set[Future[Any]] = field(default_factory=set)
    """Futures whose cancellation is already watched."""

    def begin(self, binding: Binding, segment: Segment) -> None:
        """Start it with the prompt and the segment settled at admission."""
        self.binding, self.segment, self.tokens = binding, segment, list(binding.prompt)
        self.begun_s = time.perf_counter()
        self.ended = self.decoding is None
        if self.decoding is not None and self.decoding.is_silent:
            self._end(self.decoding)
        self.encoding.bound(segment)
        if self.decoding is not None and self.decoding.known_answer is not None and not self.ended:
            self._take_known(self.decoding, self.decoding.known_answer)

    def begin_elsewhere(self, prompt: tuple[int, ...], position: int) -> None:
        """Start it on a remote engine, where its view and its segment are."""
        self.binding = Binding((), prompt, position)

    def _take_known(self, decoding: Decoding, tokens: Sequence[int]) -> None:
        """Append an answer that is known in advance: no step has to sample it."""
        for token in tokens:
            chosen = SampledToken(token)
            for listener in self.listeners if self.take(chosen) else ():
                listener(chosen)
            if self.ended:
                return
        self._end(decoding)

    def hand_over(self) -> Segment | None:
        """Pass on its segment with the pin that came with it, once: the caller keeps it or unpins it."""
        if self.handed_over:
            return None
        self.handed_over = True
        return self.segment

    def give_back(self, pool: KVPool) -> None:
        """Close its encoding, and unpin its segment unless that was passed on."""
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
        """Number of tokens known but not yet encoded."""
        return len(self.tokens) - self.encoded

    @property
    def reused(self) -> int:
        """Number of tokens that it attends to and was not charged for; 0 if only readers asked for it."""
        if self.binding is None or self.readers or (self.again and self.readers is not None):
            return 0
        return sum(piece.count for piece in self.binding.view) - self._paid_in_view() + self.reused_elsewhere

    @property
    def tokens_outside_view(self) -> int:
        """Number of tokens that it was charged for in messages outside its view.

        They belong to ancestors that its view's messages had attended to.
        """
        return sum(self.for_others.values()) - self._paid_in_view() + self.beyond_elsewhere

    def _paid_in_view(self) -> int:
        """Return the number of tokens that it was charged for in messages of its view."""
        view_segments = set() if self.binding is None else {piece.segment for piece in self.binding.view}
        return sum(tokens for segment, tokens in self.for_others.items() if segment in view_segments)

    def advance(self, tokens: int) -> None:
        """Record that a step encoded `tokens` more of it, and charge them to a request."""
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
        """Fields of `Counters` that its encoded tokens go into."""
        if self.again or self.mapper:
            return ("tokens_recomputed" if self.again else "tokens_mapped",)
        return ("tokens_encoded", "tokens_of_other_models") if self.is_foreign else ("tokens_encoded",)

    def billed_request(self) -> Request:
        """Return the earliest call that waits for it, directly or through other requests; itself if there is none."""
        calls: list[Request] = []
        visited: set[Request] = {self}
        queue: list[Request] = [self]
        for request in queue:
            waiting = [reader for reader in request.readers or () if not reader.over]
            if not waiting:
                calls.append(request)
            for reader in waiting:
                if reader not in visited:
                    visited.add(reader)
                    queue.append(reader)
        return min(calls, key=lambda call: (call.readers is not None, call.number))

    def reads_unencoded_of(self, writer: Request) -> bool:
        """Return whether it has begun to read tokens that another request has not encoded yet."""
        segment, view = writer.segment, () if self.binding is None else self.binding.view
        if segment is None or segment.pins < 2:
            return False
        return any(piece.segment is segment and piece.first + piece.count > segment.encoded for piece in view)

    def room(self) -> int:
        """Return the most tokens of KV that it can need, were it admitted now."""
        return self.encoding.prompt_tokens() + (0 if self.decoding is None else self.decoding.longest)

    def cancelled(self) -> bool:
        return all(future.cancelled() for future in self.futures)

    def watch_cancellation(self, notify: Callable[[], None]) -> None:
        """Call `notify`, on any thread, when a current caller cancels; each future is watched once."""
        for future in self.futures:
            if future not in self._watched:
                self._watched.add(future)
                future.add_done_callback(lambda ended: notify() if ended.cancelled() else None)

    def pop_expired(self, now: float) -> list[Future[Any]]:
        """Remove and return the futures whose deadline has passed."""
        if not self.deadlines:
            return []
        expired = [future for future, deadline in self.deadlines.items() if deadline <= now]
        for future in expired:
            del self.deadlines[future]
            self.futures.remove(future)
        return expired

    def take(self, chosen: SampledToken) -> bool:
        """Append a sampled token, and the turn suffix after the last one; return whether it is part of the message."""
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
        """Stop sampling, and append what the model has not generated of the turn suffix."""
        self.ended = True
        self.tokens.extend(decoding.missing_end(self.sampled))

    def done(self) -> bool:
        """Return whether nothing is left to sample or, where later readers need it, to encode."""
        prompt = 0 if self.binding is None else len(self.binding.prompt)
        return self.ended and (self.pending == 0 or (self.encoded >= prompt and not self.encodes_end))


@dataclass
class Decoding:
    """The sampling part of a request: when it ends, and which sampled tokens are the message."""

    sampling: Sampling
    sampler: Sampler
    stop_tokens: frozenset[int]
    turn_suffix: tuple[int, ...]
    """Tokens that the message ends with, whether the model generates them or not."""
    stop_text: Callable[[int], bool] | None = None
    """Called with every sampled token, in order; returns whether a stop text is complete with it."""
    left_out: frozenset[int] = frozenset()
    """Tokens that end the decode and are not part of the message, unless they begin the turn suffix."""
    closes: frozenset[int] = frozenset()
    """Tokens that end the message in place of the turn suffix."""
    thoughts: int = 0
    """Number of forced tokens that come before the answer."""
    complete: bool = False
    """Whether the forced tokens are an answer that a constraint ends, whatever their number."""
    known_answer: tuple[int, ...] | None = None
    """The answer, if it is known in advance: it is encoded like a prompt. None: it is sampled."""
    seed: int = 0
    """Seed of its sampler."""
    cut: bool = False
    """Whether it ended because it may sample no more tokens."""

    @property
    def longest(self) -> int:
        """Most tokens that it can add, turn suffix included."""
        constraint = self.sampler.constraint
        return (self.sampling.longest if constraint is None else constraint.longest) + len(self.turn_suffix)

    def ends(self, sampled: list[int]) -> bool:
        """Return whether these are all the tokens to sample; called once after each."""
        sampling, constraint = self.sampling, self.sampler.constraint
        forced = sampling.forced_token_ids
        if forced is None and constraint is not None:
            self.cut = constraint.cut
            return constraint.done
        stopped = self.stop_text is not None and self.stop_text(sampled[-1])
        stopped = stopped or sampled[-1] in self.stop_tokens
        is_full = len(sampled) - self.thoughts >= sampling.max_tokens
        # An answer chosen from a list is never cut.
        self.cut = is_full and not (stopped or self.complete or sampling.choices)
        return len(sampled) == len(forced) if forced is not None else stopped or is_full

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why it ended, once it has."""
        return "length" if self.cut else "stop"

    @property
    def is_silent(self) -> bool:
        """True if it samples nothing: the message is its header and turn suffix."""
        return self.sampling.forced_token_ids is not None and not self.sampling.forced_token_ids

    def leaves_out_last(self, sampled: list[int]) -> bool:
        """Return whether the last sampled token only ended the decode and is not part of the message's turn suffix."""
        if self.sampling.forced_token_ids is not None or sampled[-1] not in self.left_out:
            return False
        return self.missing_end(sampled) == self.turn_suffix

    def missing_end(self, sampled: list[int]) -> tuple[int, ...]:
        """Return the tokens of the turn suffix that the model has not generated itself."""
        if sampled and sampled[-1] in self.closes:
            return ()
        for count in range(min(len(self.turn_suffix), len(sampled)), 0, -1):
            if tuple(sampled[-count:]) == self.turn_suffix[:count]:
                return self.turn_suffix[count:]
        return self.turn_suffix
