"""Builder of requests: tokenizes and validates calls, finds and places their parents, and names them.

Also the owner of a running request, which turns its end into a message for all its callers.
"""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from choreo_agents.engine.calls import Content, Decode, Prefill, Thinking
from choreo_agents.engine.constraints import (
    ConstrainedDecode,
    TextStop,
    constrained_answer,
    ends_replay,
    longest_thoughts,
    thinking_constraint,
    thoughts_in,
)
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.messages.message import (
    Label,
    Lineage,
    Message,
    MessageIds,
    Placement,
    Scope,
    Usage,
    place,
    who_thinks,
)
from choreo_agents.engine.messages.table import require_handle
from choreo_agents.errors import AdapterError, ContextLengthError, InvalidRequestError, KVBudgetError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.store import KVKey
from choreo_agents.models import PromptText
from choreo_agents.runtime.request import Decoding, Request
from choreo_agents.sampling import (
    AnswerConstraint,
    SampledToken,
    Sampler,
    SamplerCall,
    Sampling,
    TokenSampler,
    nth_seed,
)

Answer = Future[MessageHandle]
OnToken = Callable[[SampledToken], None]


@dataclass(frozen=True)
class ReadCall:
    """A call whose texts are tokenized."""

    call: Prefill | Decode
    tokens: tuple[int, ...]
    turn_suffix: tuple[int, ...]
    sample: int = 0
    """Index among the answers that the call asks for."""
    stops: frozenset[int] = frozenset()
    """Tokens after which a decode ends."""
    over: frozenset[int] = frozenset()
    """These, and the token of its turn suffix that ends the message, if there is one."""
    led: ConstrainedDecode | None = None
    """Constraint on its answers; None: none."""
    left_out: frozenset[int] = frozenset()
    """Same as in `Decoding`."""
    closes: frozenset[int] = frozenset()
    """Same as in `Decoding`."""
    thoughts: int = 0
    """Most tokens that thoughts and their end can take."""

    @property
    def longest(self) -> int:
        """Most tokens that it can add to these."""
        if isinstance(self.call, Prefill):
            return 0
        sampled = self.call.sampling.longest if self.led is None else self.led.longest
        thought = self.thoughts if self.call.sampling.forced_token_ids is None else 0
        return sampled + thought + len(self.turn_suffix)


@dataclass(frozen=True, eq=False)
class PlacedCall:
    """A call whose parents are found and placed."""

    read: ReadCall
    lineage: Lineage
    label: Label
    """Metadata that it gives its message."""
    name: str | None
    """Name by which an equal call is found: for a prefill, the id of its message; for a decode, the key of its
    remembered answer."""


@dataclass(eq=False)
class Pending:
    """Owner of a request that will be a message (see `Owner`)."""

    core: EngineCore
    message_ids: MessageIds
    placed: PlacedCall
    """The first of its calls."""
    encodes_end: bool
    running: dict[str, Request]
    """Running requests by the call's name, where an equal call finds it."""
    scopes: dict[Answer, Scope | None] = field(default_factory=dict)
    """Scopes for the leases of its callers."""
    labels: list[Label] = field(default_factory=list)
    """Metadata that its callers give the message."""
    prefills: set[Answer] = field(default_factory=set)
    """Futures of prefills that want it encoded now: all but one of them have found it."""

    def awaited(
        self, request: Request, placed: PlacedCall, scope: Scope | None, until: float | None, on_token: OnToken | None
    ) -> Answer:
        """Add a caller, and return its future.

        Args:
            request: Its request.
            placed: Call of the caller.
            scope: Scope that takes the lease.
            until: Deadline of the caller, in seconds of `time.perf_counter`.
            on_token: Called with every token, also with those sampled before.
        """
        answer: Answer = Future()
        request.futures.append(answer)
        self.scopes[answer] = scope
        self.labels.append(placed.label)
        if isinstance(placed.read.call, Prefill) and not placed.read.call.lazy:
            self.prefills.add(answer)
        if until is not None:
            request.deadlines[answer] = until
        if on_token is not None:
            for chosen in request.chosen:
                on_token(chosen)
            request.listeners.append(on_token)
        return answer

    def finish(self, request: Request) -> MessageHandle:
        """Make a message of the finished request, with a lease for each of its callers: all or nothing."""
        self._forget()
        core, lineage, created = self.core, self.placed.lineage, self._build_message(request)
        request.encoding.close(request)
        # From here on the table owns the segment.
        with core.table.insert_transaction(created, request.hand_over()) as message:
            for label in self.labels:
                label.put_on(message)
            scopes = [self.scopes[answer] for answer in request.futures]
            open_scopes = [scope for scope in scopes if scope is None or not scope.closed]
            for scope in open_scopes:
                core.table.lease(message, scope)
            if request.decoding is not None and self.placed.name is not None and message.leases:
                core.table.remember(self.placed.name, message, next(iter(open_scopes), None))
            joined = max(0, len(self.prefills.intersection(request.futures)) - 1)
            # Prefills that found their message being encoded for another call.
            core.counters.add(lineage.tenant, "tokens_reused", lineage.prompt_tokens() * joined)
        return message.handle

    def abandon(self, request: Request) -> None:
        """Release everything that an unfinished request holds."""
        self._forget()
        try:
            request.give_back(self.core.pool)
        finally:
            # A model's own sampler may fail here: the engine's memory is released before.
            if request.decoding is not None:
                request.decoding.sampler.withdraw()

    def _build_message(self, request: Request) -> Message:
        """Return the message of a finished request."""
        assert request.binding is not None
        prompt = self.placed.lineage.tokens
        lineage = replace(self.placed.lineage, tokens=prompt + tuple(request.tokens[len(request.binding.prompt) :]))
        return Message(
            self.message_ids.handle(lineage),
            lineage,
            request.author,
            request.role,
            Usage.of(request),
            request.label,
            self.labels[0].origin(request.label),
            None if request.decoding is None else tuple(request.chosen),
            header=len(prompt),
            finish_reason=None if request.decoding is None else request.decoding.finish_reason,
        )

    def _forget(self) -> None:
        """Remove it from the running requests."""
        if self.placed.name is not None:
            self.running.pop(self.placed.name, None)


_REMEMBERED_CALLS = 65_536
_TEXTS_KEPT = 512
_GRAMMARS_KEPT = 256
_LONGEST_KEPT = 1024
"""Most characters of a text whose tokens are cached."""


class RequestBuilder:
    """Turns a tenant's calls into requests; rejects those that can never work before any work is done.

    Args:
        core: Core that they are for.
        message_ids: Ids of the tenant's messages.
    """

    def __init__(self, core: EngineCore, message_ids: MessageIds) -> None:
        self._core, self._message_ids = core, message_ids
        self.running: dict[str, Request] = {}
        """Running requests by the call's name, from creation to end; used under the engine's lock."""
        self._repeats: OrderedDict[str, int] = OrderedDict()
        # Agents repeat headers, system prompts and input messages in every call. The cache is per tenant, since timing
        # would reveal whether another tenant has tokenized a text. A `str` and a `PromptText` of equal characters are
        # different keys.
        self._encoded = lru_cache(_TEXTS_KEPT)(lambda text: tuple(core.model.encode(text)))
        # A model whose tokens cannot be constrained raises only where a constraint is used.
        self._compiled = lru_cache(_GRAMMARS_KEPT)(lambda grammar: core.model.grammars.compile(grammar))  # noqa: PLW0108 - see above

    def read(self, call: Prefill | Decode) -> list[ReadCall]:
        """Validate and tokenize a call, once for every answer that it asks for.

        Needs no lock: long texts take long.
        """
        require_urgency(call)
        _require_labels(call)
        if isinstance(call, Prefill):
            tokens = self._nonempty_tokens(call, call.content, "content", "nothing to prefill: the content is empty")
            return [ReadCall(call, tokens, ())]
        tokens = self._nonempty_tokens(
            call,
            call.header,
            "header",
            "the header is empty: the first token is sampled from what its last token encodes. Give "
            "engine.chat.header(None), or other text",
        )
        if not isinstance(call.sampling, Sampling):
            raise InvalidRequestError(f"sampling must be a Sampling, as in Sampling(seed=1), not {call.sampling!r}")
        # First of all: names, seeds and samplers must use the same sampling.
        call = replace(call, sampling=call.sampling.with_defaults(self._core.model.sampling_defaults))
        self._tokens(call.sampling.forced_token_ids or (), "sampling.forced_token_ids")
        closing = self._tokens(() if call.turn_suffix is None else call.turn_suffix, "turn_suffix")
        closes = frozenset(self._tokens(call.extra_stop_token_ids, "extra_stop_token_ids"))
        model, named, closer_end = (
            self._core.model,
            call.sampling.stop_tokens,
            self._core.model.turn_end_length(closing),
        )
        # Token of the turn suffix that ends the message, if there is one.
        closer = () if call.in_parts else closing[max(0, closer_end - 1) : closer_end]
        stops = closes.union((*model.adapter.end_tokens, *closer) if named is None else named)
        over = stops.union(closer)
        led = constrained_answer(model, call, over, self._compiled)
        ends = (stops if led is None else led.ends).difference(named or ())
        left_out = frozenset[int]() if call.turn_suffix is None else ends - closes
        if not isinstance(call.thinking, Thinking | None):
            raise InvalidRequestError(f"thinking must be a Thinking, not {call.thinking!r}")
        thoughts = 0 if call.thinking is None else longest_thoughts(model, call.thinking)
        return [
            ReadCall(call, tokens, closing, sample, stops, over, led, left_out, closes, thoughts)
            for sample in range(call.sampling.n)
        ]

    def place(self, read: ReadCall) -> PlacedCall:
        """Find and place the parents; raises what `Engine.prefill` raises. Call it under the engine's lock."""
        call = read.call
        parents = tuple(self.find(parent) for parent in _as_list(call.parents, "parents"))
        if isinstance(call, Prefill) and call.maps:
            lineage = self._mapped_lineage(read, call, parents)
        else:
            offsets = None if call.offsets is None else _as_list(call.offsets, "offsets")
            placement = place([len(parent.tokens) for parent in parents], offsets, call.position)
            adapter = self._core.adapters.find(call.adapter, self._message_ids.tenant).lora_key
            lineage = Lineage(read.tokens, parents, placement, self._message_ids.tenant, adapter)
        read = self._fit_max_tokens(read, lineage)
        self._require_fit(lineage, read.longest, thinks=bool(read.thoughts))
        source, model = call.source if isinstance(call, Prefill) else None, self._core.model.adapter.fingerprint
        foreign = None if source is None or require_handle(source).base_model == model else source
        own = None if source is None or foreign is not None else self.find(source)
        label = Label(call.author, call.confidential, own, foreign, is_thought=bool(read.thoughts))
        return PlacedCall(read, lineage, label, self._call_name(read, lineage))

    def request(self, placed: PlacedCall) -> Request:
        """Return a new request for a call, which wants what it reads from now on."""
        core, call, lineage = self._core, placed.read.call, placed.lineage
        if isinstance(call, Prefill):
            decoding, role, label = None, call.role, lineage.label(call.author, call.role, placed.label.source)
        else:
            decoding, role = self._decoding(lineage, placed.read, call), "assistant"
            # Distinguishes it from other calls of its author over an equal view (see `Lineage.label`).
            place = "" if call.played is None else f" {call.played.place}"
            label = lineage.label(call.author, f"decode {placed.read.sample}{place}")
        keeps_end = decoding is None or core.method.keeps_kv
        encoding = core.method.encoding(lineage)
        pending = Pending(core, self._message_ids, placed, keeps_end, self.running)
        request = Request(
            core.next_number(),
            encoding,
            pending,
            decoding,
            call.author,
            role,
            adapter=lineage.adapter,
            mapper=lineage.mapper,
            again=isinstance(call, Prefill) and call.recomputed,
            is_foreign=placed.label.foreign is not None,
            label=label,
            tenant=lineage.tenant,
            priority=call.priority,
        )
        if placed.name is not None:
            self.running[placed.name] = request
        return request

    def find(self, handle: MessageHandle) -> Message:
        """Return the leased message of one of the tenant's handles; raises a `HandleError` otherwise."""
        return self._core.table.find(handle, self._message_ids.tenant)

    def key(self, call: Prefill) -> KVKey:
        """Return the key of the KV that a prefill would make; its parents need not exist.

        Raises:
            InvalidRequestError: It can never work, is a mapped copy's, or its parents are not handles or wrongly
                placed.
        """
        [read] = self.read(call)
        if call.maps:
            raise InvalidRequestError("a cache mapper's copy is made of its source: its KV has no key")
        parents = _as_list(call.parents, "parents")
        for parent in parents:
            require_handle(parent)
        offsets = None if call.offsets is None else _as_list(call.offsets, "offsets")
        placed = place([parent.length for parent in parents], offsets, call.position)
        with self._core.lock:
            adapter = self._core.adapters.find(call.adapter, self._message_ids.tenant).lora_key
        return self._message_ids.key(read.tokens, parents, placed.offsets, placed.position, adapter)

    def _call_name(self, read: ReadCall, lineage: Lineage) -> str | None:
        call = read.call
        if isinstance(call, Prefill):
            return self._message_ids.handle(lineage).id
        if call.idempotency_key is None:
            return None
        closing = "" if call.turn_suffix is None else f"[{','.join(map(str, read.turn_suffix))}]"
        thinking = "" if call.thinking is None else f" {call.thinking!r}"
        thinking += f" ends {sorted(read.closes)}" if read.closes else ""
        thinking += " in parts" if call.in_parts else ""
        constraint = "" if call.constraint is None else f" constraint {call.constraint.key!r}"
        named = self._message_ids.handle(lineage).id
        identity = f"{read.sample} {named} {canonical(call.sampling)} {closing}{thinking}{constraint}"
        return f"{call.idempotency_key} {hashlib.sha256(identity.encode()).hexdigest()[:32]}"  # stored: no text

    def _mapped_lineage(self, read: ReadCall, call: Prefill, parents: tuple[Message, ...]) -> Lineage:
        """Return the lineage of a mapped copy: the same tokens at the same place."""
        mapper = self._core.adapters.find(call.adapter, self._message_ids.tenant).mapper_key
        if len(parents) != 1 or not mapper:
            raise AdapterError(f"{len(parents)} messages cannot be mapped by {call.adapter!r}: name one, and a mapper")
        [source] = parents
        at = source.native_offset
        if read.tokens != source.tokens or call.offsets is not None or call.position is not None:
            raise InvalidRequestError(
                "a mapped copy says what its parent says, where that was encoded: give its tokens as content, and no "
                "offsets; or use map()"
            )
        return Lineage(source.tokens, parents, Placement((at,), at), self._message_ids.tenant, mapper=mapper)

    def _decoding(self, lineage: Lineage, read: ReadCall, call: Decode) -> Decoding:
        """Return how a decode samples. Derives its seed, so call it once for each decode that really runs."""
        sampling, model = call.sampling, self._core.model
        seed = self._call_seed(lineage, sampling) if sampling.seed is None else nth_seed(sampling.seed, read.sample)
        constraint: Callable[[], AnswerConstraint] | None = None if read.led is None else read.led.make
        if call.thinking is not None and sampling.forced_token_ids is None:
            constraint = partial(thinking_constraint, model, sampling, call.thinking, read.over, read.led)
        sampler: Sampler
        played = call.played
        if model.sampler is None or (played is not None and played.at_once):  # a known answer needs no sampler
            sampler = TokenSampler(
                sampling, seed, lineage.text(), call.logits_callback, None if constraint is None else constraint()
            )
        else:
            view = tuple((parent.author, parent.tokens) for parent in lineage.parents)
            author = call.author if call.author is None or call.thinking is None else who_thinks(call.author)
            sampler = model.sampler(
                SamplerCall(author, view, lineage.tokens, sampling, constraint, call.logits_callback)
            )
        stop_text = TextStop(model, sampling.stop).ends_with if sampling.stop and constraint is None else None
        ends = (read.stops, read.turn_suffix, stop_text, read.left_out, read.closes)
        thoughts, complete = 0, False
        if (forced := sampling.forced_token_ids) is not None:
            thoughts = thoughts_in(model, call.thinking, forced)
            complete = ends_replay(model, call, read.over, self._compiled, forced[thoughts:])
        decoding = Decoding(sampling, sampler, *ends, thoughts, complete, seed=seed)
        if played is not None and played.at_once:
            decoding.known_answer = played.tokens if forced is None else forced
        elif played is not None and played.tokens is not None and isinstance(sampler, TokenSampler):
            sampler.played = played.tokens
        return decoding

    def _nonempty_tokens(self, call: Prefill | Decode, content: Content, name: str, empty: str) -> tuple[int, ...]:
        """Return the tokens of a text; raises if there are none."""
        tokens = self._tokens(
            PromptText.plain(content) if call.escape_special_tokens and isinstance(content, str) else content, name
        )
        if not tokens:
            raise InvalidRequestError(empty)
        return tokens

    def _tokens(self, content: Content, name: str) -> tuple[int, ...]:
        if isinstance(content, str | PromptText):
            try:
                if len(content) > _LONGEST_KEPT:
                    return tuple(self._core.model.encode(content))
                return self._encoded(content)
            except (TypeError, UnicodeError) as error:
                raise InvalidRequestError(f"the {name} cannot be tokenized: {error}") from error
        if isinstance(content, bytes | bytearray | Mapping) or not isinstance(content, Iterable):
            raise InvalidRequestError(f"the {name} must be text or token ids, not {content!r:.80}")
        size = self._core.model.adapter.vocabulary_size
        return tuple(_token(item, size) for item in _as_list(content, name))

    def _fit_max_tokens(self, read: ReadCall, lineage: Lineage) -> ReadCall:
        """Lower the default of `max_tokens` so that the answer fits behind its view."""
        if isinstance(read.call, Prefill) or read.call.sampling.is_bounded:
            return read
        core, sampling = self._core, read.call.sampling
        over = core.method.reach(lineage, read.longest) - core.model.adapter.max_positions
        over = max(over, core.method.room(lineage, read.longest) - core.total_tokens)
        shorter = sampling.within(sampling.max_tokens - over)
        if shorter is sampling or over >= sampling.max_tokens:
            return read
        call = replace(read.call, sampling=shorter)
        led = None if read.led is None else constrained_answer(core.model, call, read.over, self._compiled)
        return replace(read, call=call, led=led)

    def _require_fit(self, lineage: Lineage, added: int, *, thinks: bool) -> None:
        lower = "lower max_tokens or the budget of its thoughts" if thinks else "lower max_tokens"
        end, most = self._core.method.reach(lineage, added), self._core.model.adapter.max_positions
        if end > most:
            raise ContextLengthError(
                f"the view and its new message reach position {end}, the model's context ends at {most}: "
                f"show fewer or shorter messages, or {lower}"
            )
        room = self._core.method.room(lineage, added)
        if room > self._core.total_tokens:
            raise KVBudgetError(
                f"the call and what it reads need KV memory for {room} tokens, "
                f"the engine has {self._core.total_tokens} in all: "
                f"load it with a larger kv_budget_bytes, or {lower}"
            )

    def _call_seed(self, lineage: Lineage, sampling: Sampling) -> int:
        """Return a seed that differs for each repetition of a call, and is the same in each run of a program."""
        call = f"{self._message_ids.lasting(lineage)} {canonical(sampling)}"
        repeat = self._repeats.pop(call, 0)
        self._repeats[call] = repeat + 1
        while len(self._repeats) > _REMEMBERED_CALLS:
            self._repeats.popitem(last=False)
        digest = hashlib.sha256(f"{self._core.settings.seed} {repeat} {call}".encode()).digest()
        return int.from_bytes(digest[:7], "big")


def require_urgency(call: Prefill | Decode) -> None:
    """Raise `InvalidRequestError` unless priority and timeout are valid numbers."""
    if not isinstance(call.priority, int):
        raise InvalidRequestError(f"priority must be an integer, not {call.priority!r}")
    timeout = call.timeout_s
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise InvalidRequestError(f"timeout_s must be a number of seconds, not {timeout!r}")


def _require_labels(call: Prefill | Decode) -> None:
    """Raise `InvalidRequestError` unless a call's metadata is valid."""
    for name in ("author", "adapter", "role", "idempotency_key"):
        if not isinstance(value := getattr(call, name, None), str | None):
            raise InvalidRequestError(f"{name} must be a string or None, not {value!r}")
    for name in ("confidential", "lazy", "maps", "recomputed", "regenerate"):
        if not isinstance(value := getattr(call, name, False), bool):
            raise InvalidRequestError(f"{name} must be True or False, not {value!r}")
    callback = None if isinstance(call, Prefill) else call.logits_callback
    if callback is not None and not callable(callback):
        raise InvalidRequestError(f"logits_callback must be a function of the logits, not {callback!r}")


def canonical(sampling: Sampling) -> str:
    """Return a sampling as JSON without unused later fields, under first names: calls keep their derived seeds."""
    unused = set() if sampling.choices else {"choices", "answer_prefix"}
    unused |= set() if sampling.constraint is not None else {"constraint"}
    unused |= set() if sampling.is_bounded else {"max_tokens"}  # lowered to the memory that was free
    unused |= {name for name in ("presence_penalty", "frequency_penalty") if not getattr(sampling, name)}
    return sampling.model_dump_json(exclude=unused, by_alias=True)


def _token(item: Any, size: int) -> int:
    """Return a token id, also of numpy's and torch's integers."""
    try:
        token = operator.index(item)
    except TypeError:
        token = -1
    if isinstance(item, bool) or not 0 <= token < size:
        raise InvalidRequestError(f"{item!r} is no token: ids run from 0 to {size - 1}")
    return token


def _as_list(items: Any, name: str) -> list[Any]:
    if isinstance(items, MessageHandle | str) or not isinstance(items, Iterable):
        raise InvalidRequestError(f"{name} must be a list, not {items!r}")
    return list(items)
