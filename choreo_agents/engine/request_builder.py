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
from functools import cached_property, lru_cache, partial
from typing import Any

from choreo_agents.engine.calls import Calls, Content, Decode, Prefill, Thinking
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
    Lineage,
    Message,
    MessageIds,
    Placement,
    Scope,
    Usage,
    place,
    thinker,
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
    """A call whose texts are tokenized: one of the answers that it asks for."""

    call: Prefill | Decode
    tokens: tuple[int, ...]
    turn_suffix: tuple[int, ...] = ()
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

    @property
    def thinks(self) -> bool:
        """True if the message holds thoughts and answer, and is internal: its answer is encoded again."""
        return isinstance(self.call, Decode) and self.call.thinking is not None

    @property
    def author(self) -> str | None:
        """Author of its message."""
        author = self.call.author
        return thinker(author) if self.thinks and author is not None else author

    @property
    def role(self) -> str | None:
        """Role of its message."""
        return self.call.role if isinstance(self.call, Prefill) else "assistant"


@dataclass(eq=False)
class PlacedCall:
    """A call whose parents are found and placed.

    If no message answers it and no equal call is running, it gets a request and owns it (see `Owner`): when that ends,
    it makes the message for all calls that have joined.
    """

    builder: RequestBuilder
    read: ReadCall
    lineage: Lineage
    name: str | None
    """Name by which an equal call is found: for a prefill, the id of its message; for a decode, the key of its
    remembered answer."""
    source: Message | None = None
    """Message whose text it encodes again."""
    foreign: MessageHandle | None = None
    """Message of another model whose text it encodes, in place of a source."""
    callers: dict[Answer, tuple[PlacedCall, Scope | None]] = field(default_factory=dict)
    """Calls that wait for its request, itself first, each with the scope that takes its lease."""

    @cached_property
    def label(self) -> str:
        """Name that is the same in every run of the program, whatever the text (see `StepTrace`)."""
        call = self.read.call
        if isinstance(call, Prefill):
            return self.lineage.label(call.author, call.role, self.source)
        # Distinguishes it from other calls of its author over an equal view (see `Lineage.label`).
        place = "" if call.played is None else f" {call.played.place}"
        return self.lineage.label(self.read.author, f"decode {self.read.sample}{place}")

    def message(self, lineage: Lineage, usage: Usage) -> Message:
        """Return a new message of this call, whose lineage may be placed, or end, as only its encoding has shown."""
        origin = self.label if self.source is None else self.source.origin
        handle, read = self.builder.message_ids.handle(lineage), self.read
        header = len(self.lineage.tokens)
        return Message(handle, lineage, read.author, read.role, usage, self.label, origin, header=header)

    def put_on(self, message: Message) -> None:
        """Add what it says of its message to what other calls have said of the same."""
        if self.read.author is not None:
            message.authors.add(self.read.author)
        message.marked = message.marked or self.read.call.confidential
        message.is_thought = message.is_thought or self.read.thinks
        if self.source is not None and self.source is not message and self.source not in message.sources:
            # The source may be unleased, and every run finds the message again: forgotten sources must not pile up.
            sources = [source for source in message.sources if not source.forgotten]
            message.sources = [*sources, self.source]
        if self.foreign is not None and self.foreign not in message.foreign:
            message.foreign.append(self.foreign)

    def join(
        self, request: Request, caller: PlacedCall, scope: Scope | None, until: float | None, on_token: OnToken | None
    ) -> Answer:
        """Add a caller to its request, and return the caller's future.

        Args:
            request: Its request.
            caller: This call, or an equal one.
            scope: Scope that takes the lease.
            until: Deadline of the caller, in seconds of `time.perf_counter`.
            on_token: Called with every token, also with those sampled before.
        """
        answer: Answer = Future()
        request.futures.append(answer)
        self.callers[answer] = caller, scope
        if until is not None:
            request.deadlines[answer] = until
        if on_token is not None:
            for chosen in request.chosen:
                on_token(chosen)
            request.listeners.append(on_token)
        return answer

    def finish(self, request: Request) -> MessageHandle:
        """Make a message of the finished request, with a lease for each of its callers: all or nothing."""
        callers = self._forget()
        assert request.binding is not None
        table, made = self.builder.core.table, tuple(request.tokens[len(request.binding.prompt) :])
        created = self.message(replace(self.lineage, tokens=self.lineage.tokens + made), Usage.of(request))
        if request.decoding is not None:
            created.chosen, created.finish_reason = tuple(request.chosen), request.decoding.finish_reason
        request.encoding.close(request)
        # From here on the table owns the segment.
        with table.insert_transaction(created, request.hand_over()) as message:
            for caller, _ in callers.values():
                caller.put_on(message)
            waiting = [callers[answer] for answer in request.futures]
            open_scopes = [scope for _, scope in waiting if scope is None or not scope.closed]
            for scope in open_scopes:
                table.lease(message, scope)
            if request.decoding is not None and self.name is not None and message.leases:
                table.remember(self.name, message, next(iter(open_scopes), None))
            # All but one of the prefills that want it encoded now have found it being encoded.
            prefills = sum(isinstance(c.read.call, Prefill) and not c.read.call.lazy for c, _ in waiting)
            reused = self.lineage.prompt_tokens() * max(0, prefills - 1)
            self.builder.core.counters.add(self.lineage.tenant, "tokens_reused", reused)
        return message.handle

    def abandon(self, request: Request) -> None:
        """Release everything that an unfinished request holds."""
        self._forget()
        try:
            request.give_back(self.builder.core.pool)
        finally:
            # A model's own sampler may fail here: the engine's memory is released before.
            if request.decoding is not None:
                request.decoding.sampler.withdraw()

    def _forget(self) -> dict[Answer, tuple[PlacedCall, Scope | None]]:
        """Remove it from the running requests, and return its callers."""
        if self.name is not None:
            self.builder.running.pop(self.name, None)
        # It refers to itself no longer: lineage ends when the last reference is dropped, and not at some collection.
        callers, self.callers = self.callers, {}
        return callers


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
        self.core, self.message_ids = core, message_ids
        self.running: dict[str, Request] = {}
        """Running requests by the call's name, from creation to end; used under the engine's lock."""
        self._repeats: OrderedDict[str, int] = OrderedDict()
        # Agents repeat headers, system prompts and input messages in every call. The cache is per tenant, since timing
        # would reveal whether another tenant has tokenized a text. A `str` and a `PromptText` of equal characters are
        # different keys.
        self._encoded = lru_cache(_TEXTS_KEPT)(lambda text: tuple(core.model.encode(text)))
        # A model whose tokens cannot be constrained raises only where a constraint is used.
        self._compiled = lru_cache(_GRAMMARS_KEPT)(lambda grammar: core.model.grammars.compile(grammar))  # noqa: PLW0108 - see above

    def read(self, calls: Calls) -> list[ReadCall]:
        """Validate and tokenize calls, each once for every answer that it asks for.

        Needs no lock: long texts take long.
        """
        return [read for call in calls for read in self._read(call)]

    def _read(self, call: Prefill | Decode) -> list[ReadCall]:
        require_urgency(call)
        _require_labels(call)
        if isinstance(call, Prefill):
            tokens = self._nonempty_tokens(call, call.content, "content", "nothing to prefill: the content is empty")
            return [ReadCall(call, tokens)]
        tokens = self._nonempty_tokens(
            call,
            call.header,
            "header",
            "the header is empty, but the first token is sampled behind its last token: pass engine.chat.header(None), "
            "or other text",
        )
        if not isinstance(call.sampling, Sampling):
            raise InvalidRequestError(f"`sampling` must be a Sampling, such as Sampling(seed=1), not {call.sampling!r}")
        # First of all: names, seeds and samplers must use the same sampling.
        call = replace(call, sampling=call.sampling.with_defaults(self.core.model.sampling_defaults))
        self._tokens(call.sampling.forced_token_ids or (), "sampling.forced_token_ids")
        closing = self._tokens(() if call.turn_suffix is None else call.turn_suffix, "turn_suffix")
        closes = frozenset(self._tokens(call.extra_stop_token_ids, "extra_stop_token_ids"))
        model, named = self.core.model, call.sampling.stop_tokens
        closer_end = model.turn_end_length(closing)
        # Token of the turn suffix that ends the message, if there is one.
        closer = () if call.in_parts else closing[max(0, closer_end - 1) : closer_end]
        stops = closes.union((*model.adapter.end_tokens, *closer) if named is None else named)
        over = stops.union(closer)
        led = constrained_answer(model, call, over, self._compiled)
        ends = (stops if led is None else led.ends).difference(named or ())
        left_out = frozenset[int]() if call.turn_suffix is None else ends - closes
        if not isinstance(call.thinking, Thinking | None):
            raise InvalidRequestError(f"`thinking` must be a Thinking, not {call.thinking!r}")
        thoughts = 0 if call.thinking is None else longest_thoughts(model, call.thinking)
        return [
            ReadCall(call, tokens, closing, sample, stops, over, led, left_out, closes, thoughts)
            for sample in range(call.sampling.n)
        ]

    def place(self, read: ReadCall) -> PlacedCall:
        """Find and place the parents; raises what `Engine.prefill` raises. Call it under the engine's lock."""
        call = read.call
        parents = tuple(self.find(parent) for parent in as_list(call.parents, "parents"))
        if isinstance(call, Prefill) and call.maps:
            lineage = self._mapped_lineage(read, call, parents)
        else:
            offsets = None if call.offsets is None else as_list(call.offsets, "offsets")
            placement = place([len(parent.tokens) for parent in parents], offsets, call.position)
            adapter = self.core.adapters.find(call.adapter, self.message_ids.tenant).lora_key
            lineage = Lineage(read.tokens, parents, placement, self.message_ids.tenant, adapter)
        read = self._fit_max_tokens(read, lineage)
        self._require_fit(lineage, read.longest, thinks=bool(read.thoughts))
        source, model = call.source if isinstance(call, Prefill) else None, self.core.model.adapter.fingerprint
        foreign = None if source is None or require_handle(source).base_model == model else source
        own = None if source is None or foreign is not None else self.find(source)
        return PlacedCall(self, read, lineage, self._call_name(read, lineage), own, foreign)

    def request(self, placed: PlacedCall) -> Request:
        """Return a new request for a call, which wants what it reads from now on."""
        core, read, lineage = self.core, placed.read, placed.lineage
        decoding = None if isinstance(read.call, Prefill) else self._decoding(lineage, read, read.call)
        request = Request(
            core.next_number(),
            core.method.encoding(lineage),
            placed,
            decoding,
            read.author,
            read.role,
            adapter=lineage.adapter,
            mapper=lineage.mapper,
            again=isinstance(read.call, Prefill) and read.call.recomputed,
            is_foreign=placed.foreign is not None,
            label=placed.label,
            tenant=lineage.tenant,
            priority=read.call.priority,
            encodes_end=decoding is None or core.method.keeps_kv,
        )
        if placed.name is not None:
            self.running[placed.name] = request
        return request

    def find(self, handle: MessageHandle) -> Message:
        """Return the leased message of one of the tenant's handles; raises a `HandleError` otherwise."""
        return self.core.table.find(handle, self.message_ids.tenant)

    def key(self, call: Prefill) -> KVKey:
        """Return the key of the KV that a prefill would make; its parents need not exist.

        Raises:
            InvalidRequestError: It can never work, is a mapped copy's, or its parents are not handles or wrongly
                placed.
        """
        [read] = self.read([call])
        if call.maps:
            raise InvalidRequestError("a cache mapper's copy is made of its source: its KV has no key")
        parents = as_list(call.parents, "parents")
        for parent in parents:
            require_handle(parent)
        offsets = None if call.offsets is None else as_list(call.offsets, "offsets")
        placed = place([parent.length for parent in parents], offsets, call.position)
        with self.core.lock:
            adapter = self.core.adapters.find(call.adapter, self.message_ids.tenant).lora_key
        return self.message_ids.key(read.tokens, parents, placed.offsets, placed.position, adapter)

    def _call_name(self, read: ReadCall, lineage: Lineage) -> str | None:
        call = read.call
        if isinstance(call, Prefill):
            return self.message_ids.handle(lineage).id
        if call.idempotency_key is None:
            return None
        closing = "" if call.turn_suffix is None else f"[{','.join(map(str, read.turn_suffix))}]"
        thinking = "" if call.thinking is None else f" {call.thinking!r}"
        thinking += f" ends {sorted(read.closes)}" if read.closes else ""
        thinking += " in parts" if call.in_parts else ""
        constraint = "" if call.constraint is None else f" constraint {call.constraint.key!r}"
        named = self.message_ids.handle(lineage).id
        identity = f"{read.sample} {named} {canonical(call.sampling)} {closing}{thinking}{constraint}"
        return f"{call.idempotency_key} {hashlib.sha256(identity.encode()).hexdigest()[:32]}"  # stored: no text

    def _mapped_lineage(self, read: ReadCall, call: Prefill, parents: tuple[Message, ...]) -> Lineage:
        """Return the lineage of a mapped copy: the same tokens at the same place."""
        mapper = self.core.adapters.find(call.adapter, self.message_ids.tenant).mapper_key
        if len(parents) != 1 or not mapper:
            raise AdapterError(f"{len(parents)} messages cannot be mapped by {call.adapter!r}: pass one, and a mapper")
        [source] = parents
        at = source.native_offset
        if read.tokens != source.tokens or call.offsets is not None or call.position is not None:
            raise InvalidRequestError(
                "a mapped copy has the tokens and the place of its parent: pass these tokens as content, and no "
                "offsets; or use map()"
            )
        return Lineage(source.tokens, parents, Placement((at,), at), self.message_ids.tenant, mapper=mapper)

    def _decoding(self, lineage: Lineage, read: ReadCall, call: Decode) -> Decoding:
        """Return how a decode samples. Derives its seed, so call it once for each decode that really runs."""
        sampling, model = call.sampling, self.core.model
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
            sampler = model.sampler(
                SamplerCall(call.author, view, lineage.tokens, sampling, constraint, call.logits_callback)
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
            sampler.replayed = played.tokens
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
                    return tuple(self.core.model.encode(content))
                return self._encoded(content)
            except (TypeError, UnicodeError) as error:
                raise InvalidRequestError(f"cannot tokenize the {name}: {error}") from error
        if isinstance(content, bytes | bytearray | Mapping) or not isinstance(content, Iterable):
            raise InvalidRequestError(f"the {name} must be text or token ids, not {content!r:.80}")
        size = self.core.model.adapter.vocabulary_size
        return tuple(_token(item, size) for item in as_list(content, name))

    def _fit_max_tokens(self, read: ReadCall, lineage: Lineage) -> ReadCall:
        """Lower the default of `max_tokens` so that the answer fits behind its view."""
        if isinstance(read.call, Prefill) or read.call.sampling.is_bounded:
            return read
        core, sampling = self.core, read.call.sampling
        over = core.method.reach(lineage, read.longest) - core.model.adapter.max_positions
        over = max(over, core.method.room(lineage, read.longest) - core.total_tokens)
        shorter = sampling.within(sampling.max_tokens - over)
        if shorter is sampling or over >= sampling.max_tokens:
            return read
        call = replace(read.call, sampling=shorter)
        led = None if read.led is None else constrained_answer(core.model, call, read.over, self._compiled)
        return replace(read, call=call, led=led)

    def _require_fit(self, lineage: Lineage, added: int, *, thinks: bool) -> None:
        lower = "lower max_tokens or the thinking budget" if thinks else "lower max_tokens"
        end, most = self.core.method.reach(lineage, added), self.core.model.adapter.max_positions
        if end > most:
            raise ContextLengthError(
                f"the view and the new message reach position {end}, but the model's context ends at {most}: show "
                f"fewer or shorter messages, or {lower}"
            )
        room = self.core.method.room(lineage, added)
        if room > self.core.total_tokens:
            raise KVBudgetError(
                f"the call and what it reads need KV memory for {room} tokens, but the engine has "
                f"{self.core.total_tokens} in all: load it with a larger kv_budget_bytes, or {lower}"
            )

    def _call_seed(self, lineage: Lineage, sampling: Sampling) -> int:
        """Return a seed that differs for each repetition of a call, and is the same in each run of a program."""
        call = f"{self.message_ids.lasting(lineage)} {canonical(sampling)}"
        repeat = self._repeats.pop(call, 0)
        self._repeats[call] = repeat + 1
        while len(self._repeats) > _REMEMBERED_CALLS:
            self._repeats.popitem(last=False)
        digest = hashlib.sha256(f"{self.core.settings.seed} {repeat} {call}".encode()).digest()
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
        raise InvalidRequestError(f"{item!r} is not a token id: they run from 0 to {size - 1}")
    return token


def as_list(items: Any, name: str, kind: str = "a list") -> list[Any]:
    """Return an argument as a list; raises `InvalidRequestError` if it is none."""
    if isinstance(items, MessageHandle | str) or not isinstance(items, Iterable):
        raise InvalidRequestError(f"{name} must be {kind}, not {items!r}")
    return list(items)
