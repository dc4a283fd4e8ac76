"""Reads calls: finds and places their parents, refuses what can never work, names the rest."""

from __future__ import annotations

import hashlib
import hmac
import operator
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from choreo_agents.engine.allowed import answer_guide, answer_paths
from choreo_agents.engine.calls import Content, Decode, Prefill, Usage
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.detokenizer import TextStop
from choreo_agents.engine.ledger import Message, require_handle
from choreo_agents.engine.methods import Job
from choreo_agents.engine.placement import Placement, place, require_position
from choreo_agents.errors import AdapterError, ContextLengthError, InvalidRequestError, KVBudgetError
from choreo_agents.kv.archive import KVKey
from choreo_agents.kv.handle import MessageHandle, message_id
from choreo_agents.runtime.request import Decoding
from choreo_agents.sampling import AnswerPaths, Sampler, SamplerCall, Sampling, TokenSampler, nth_seed

_REMEMBERED_CALLS = 65_536


@dataclass(frozen=True)
class ReadCall:
    """A call whose texts are tokens."""

    call: Prefill | Decode
    tokens: tuple[int, ...]
    closing: tuple[int, ...]
    sample: int = 0
    """Which of the answers that the call asks for this is."""
    stops: frozenset[int] = frozenset()
    """Tokens after which a decode ends."""
    paths: AnswerPaths | None = None
    """To the answers that are allowed; None: any is."""

    @property
    def longest(self) -> int:
        """Tokens that it can add to these at most."""
        if isinstance(self.call, Prefill):
            return 0
        sampled = self.call.sampling.longest if self.paths is None else self.paths.longest
        return sampled + len(self.closing)


class Intake:
    """Turns a tenant's calls into jobs before any work is done. Used under the engine's lock.

    Args:
        core: The engine that they are for.
        salt: The tenant's.
    """

    def __init__(self, core: EngineCore, salt: str) -> None:
        self._core = core
        self._key = hmac.new(b"choreo", salt.encode(), hashlib.sha256).digest()
        self.tenant = hashlib.sha256(self._key).hexdigest()[:16]
        """Names the tenant in the ledger; does not tell the salt."""
        self.seal = hmac.new(self._key, b"files", hashlib.sha256).digest()
        """Signs the tenant's files."""
        self._repeats: OrderedDict[str, int] = OrderedDict()

    def find(self, handle: MessageHandle) -> Message:
        """The leased message that one of the tenant's handles names; raises a `HandleError` otherwise."""
        return self._core.ledger.find(handle, self.tenant)

    def read(self, call: Prefill | Decode) -> ReadCall:
        """Check and tokenize a call by itself. Needs no lock: long texts take long."""
        _require_urgency(call)
        if isinstance(call, Prefill):
            tokens = self._tokens(call.content, "content")
            if not tokens:
                raise InvalidRequestError("nothing to prefill: the content is empty")
            return ReadCall(call, tokens, ())
        tokens = self._tokens(call.header, "header")
        if not tokens:
            raise InvalidRequestError(
                "the header is empty: the first token is sampled from what its last token encodes"
            )
        if not isinstance(call.sampling, Sampling):
            raise InvalidRequestError(f"sampling must be a Sampling, not {call.sampling!r}")
        if call.joining is not None and call.joining.maker is not self:
            raise InvalidRequestError("the joining is another engine's or tenant's: make one with joining()")
        self._tokens(call.sampling.forced or (), "sampling.forced")
        closing = self._tokens(call.closing, "closing")
        stops = frozenset(self._stops(call.sampling, closing))
        paths = answer_paths(self._core.model, call.sampling, stops | frozenset(closing[:1]))
        return ReadCall(call, tokens, closing, stops=stops, paths=paths)

    def read_samples(self, call: Decode) -> list[ReadCall]:
        """The same, once for every answer that a decode asks for."""
        read = self.read(call)
        return [replace(read, sample=sample) for sample in range(call.sampling.n)]

    def job(self, read: ReadCall) -> Job:
        """Find and place the parents; raises what `Engine.prefill` raises, before any work is done."""
        parents = tuple(self.find(parent) for parent in _listed(read.call.parents, "parents"))
        if isinstance(read.call, Prefill) and read.call.maps:
            return self._mapping(read, parents)
        offsets = None if read.call.offsets is None else _listed(read.call.offsets, "offsets")
        lengths = [len(parent.tokens) for parent in parents]
        placement = place(lengths, offsets, read.call.new_offset)
        job = Job(
            read.tokens, parents, placement, self.tenant, self._core.adapters.lora_key(read.call.adapter, self.tenant)
        )
        self._require_fit(job, read.longest)
        return job

    def _mapping(self, read: ReadCall, parents: tuple[Message, ...]) -> Job:
        """What maps a message: the same tokens in the same place."""
        call = read.call
        mapper = self._core.adapters.mapper_key(call.adapter, self.tenant)
        if len(parents) != 1 or not mapper:
            raise AdapterError(f"{len(parents)} messages cannot be mapped by {call.adapter!r}: name one, and a mapper")
        [source] = parents
        at = source.native_offset
        if read.tokens != source.tokens or call.offsets is not None or call.new_offset is not None:
            raise InvalidRequestError(
                "a mapped copy says what its parent says, where that was encoded: give its tokens as content, and no "
                "offsets; or use map()"
            )
        job = Job(source.tokens, parents, Placement((at,), at), self.tenant, mapper=mapper)
        self._require_fit(job, 0)
        return job

    def decoding(self, job: Job, read: ReadCall) -> Decoding:
        """How a decode samples. Derives its seed, so that it must be called once for each that really runs."""
        assert isinstance(read.call, Decode)
        sampling = read.call.sampling
        model = self._core.model
        seed = self._call_seed(job, sampling) if sampling.seed is None else nth_seed(sampling.seed, read.sample)
        guide = None if read.paths is None else partial(answer_guide, model, sampling, read.paths)
        sampler: Sampler
        if model.sampler is None:
            sampler = TokenSampler(sampling, seed, job.text(), read.call.watch, None if guide is None else guide())
        else:
            view = tuple((parent.author, parent.tokens) for parent in job.parents)
            call = read.call
            sampler = model.sampler(SamplerCall(call.author, view, job.tokens, sampling, guide, call.watch))
        stop_text = TextStop(model, sampling.stop).ends_with if sampling.stop and guide is None else None
        return Decoding(sampling, sampler, read.stops, read.closing, stop_text)

    def identity(self, job: Job, tokens: tuple[int, ...]) -> str:
        """The id of the message that these tokens make in the job's place."""
        parents = [parent.handle.id for parent in job.parents]
        placement = job.placement
        return message_id(self._key, self.encoder(job), tokens, parents, placement.relative(), placement.seen_since())

    def key(self, read: ReadCall) -> KVKey:
        """What names the KV that a prefill would make; its parents are not looked for.

        Raises:
            InvalidRequestError: It is a mapped copy's, or its parents are no handles or wrongly placed.
        """
        call = read.call
        if isinstance(call, Prefill) and call.maps:
            raise InvalidRequestError("a cache mapper's copy is made of its source: its KV has no key")
        parents = _listed(call.parents, "parents")
        for parent in parents:
            require_handle(parent)
        offsets = None if call.offsets is None else _listed(call.offsets, "offsets")
        placement = place([parent.length for parent in parents], offsets, call.new_offset)
        encoder = self.own_encoder(call.adapter)
        ids, relative = [parent.id for parent in parents], placement.relative()
        named = message_id(self._key, encoder, read.tokens, ids, relative)
        return KVKey(named, encoder, read.tokens, tuple(zip(ids, relative, strict=True)), placement.new_offset)

    def message(self, job: Job, tokens: tuple[int, ...], author: str | None, role: str | None, usage: Usage) -> Message:
        """The message that these tokens make in the job's place."""
        handle = MessageHandle(id=self.identity(job, tokens), model=self.encoder(job), length=len(tokens))
        made = Message(handle, self.tenant, tokens, job.parents, job.placement.relative(), author, role, usage)
        made.adapter, made.mapper, made.native_offset = job.adapter, job.mapper, job.placement.new_offset
        made.since = job.placement.since
        return made

    def arriving(self, handle: MessageHandle, offset: int) -> Message:
        """The message that is to come into a view at a position; raises what `Joining.add` raises."""
        message = self.find(handle)
        end, most = require_position("offset", offset) + handle.length, self._core.model.adapter.max_positions
        if end > most:
            raise ContextLengthError(
                f"the message would reach position {end}, the model's context ends at {most}: show it further in front"
            )
        return message

    def encoder(self, job: Job) -> str:
        """Fingerprint of what makes the job's KV: the model, with an adapter or a mapper if it has one."""
        model = self._core.model.adapter.fingerprint
        return model + (f"+{job.adapter}" if job.adapter else "") + (f"~{job.mapper}" if job.mapper else "")

    def own_encoder(self, adapter: str | None = None) -> str:
        """The same of what encodes calls that name this adapter, or none."""
        key = self._core.adapters.lora_key(adapter, self.tenant)
        return self._core.model.adapter.fingerprint + (f"+{key}" if key else "")

    def memo(self, job: Job, read: ReadCall) -> str | None:
        """Under which the answer to this very call is remembered."""
        assert isinstance(read.call, Decode)
        if read.call.memo is None:
            return None
        closing = ",".join(map(str, read.closing))
        call = f"{self.identity(job, job.tokens)} {_written(read.call.sampling)} {closing}"
        return f"{read.call.memo} {read.sample} {call}"

    def _tokens(self, content: Content, what: str) -> tuple[int, ...]:
        if isinstance(content, str):
            try:
                return tuple(self._core.model.encode(content))
            except (TypeError, UnicodeError) as error:
                raise InvalidRequestError(f"the {what} cannot be tokenized: {error}") from error
        if isinstance(content, bytes | bytearray | Mapping):
            raise InvalidRequestError(f"the {what} must be text or token ids, not {type(content).__name__}")
        size = self._core.model.adapter.vocabulary_size
        return tuple(_token(item, size) for item in _listed(content, what))

    def _stops(self, sampling: Sampling, closing: tuple[int, ...]) -> tuple[int, ...]:
        if sampling.stop_tokens is not None:
            return sampling.stop_tokens
        return (*self._core.model.adapter.end_tokens, *closing[:1])

    def _require_fit(self, job: Job, added: int) -> None:
        end, most = self._core.method.reach(job, added), self._core.model.adapter.max_positions
        if end > most:
            raise ContextLengthError(
                f"the view and its new message reach position {end}, the model's context ends at {most}: "
                "show fewer or shorter messages, or lower max_tokens"
            )
        room = self._core.method.room(job, added)
        if room > self._core.pool.total_tokens:
            raise KVBudgetError(
                f"the call and what it reads need KV memory for {room} tokens, "
                f"the engine has {self._core.pool.total_tokens} in all: "
                "load it with a larger kv_budget_bytes, or lower max_tokens"
            )

    def _call_seed(self, job: Job, sampling: Sampling) -> int:
        """Different for each repetition of a call, the same in each run of a program."""
        call = f"{self.identity(job, job.tokens)} {_written(sampling)}"
        repeat = self._repeats.pop(call, 0)
        self._repeats[call] = repeat + 1
        while len(self._repeats) > _REMEMBERED_CALLS:
            self._repeats.popitem(last=False)
        digest = hashlib.sha256(f"{self._core.settings.seed} {repeat} {call}".encode()).digest()
        return int.from_bytes(digest[:7], "big")


def _require_urgency(call: Prefill | Decode) -> None:
    """Raise unless priority and timeout are numbers that can be compared."""
    if not isinstance(call.priority, int):
        raise InvalidRequestError(f"priority must be an integer, not {call.priority!r}")
    timeout = call.timeout_s
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise InvalidRequestError(f"timeout_s must be a number of seconds, not {timeout!r}")


def _written(sampling: Sampling) -> str:
    """What it says, in JSON. Without fields of later releases that it does not use: calls keep the seeds they had."""
    return sampling.model_dump_json(exclude=None if sampling.choices else {"choices", "lead"})


def _token(item: Any, size: int) -> int:
    """A token id, also as numpy and torch write integers."""
    try:
        token = operator.index(item)
    except TypeError:
        token = -1
    if isinstance(item, bool) or not 0 <= token < size:
        raise InvalidRequestError(f"{item!r} is no token: ids run from 0 to {size - 1}")
    return token


def _listed(items: Any, what: str) -> list[Any]:
    if isinstance(items, MessageHandle | str) or not isinstance(items, Iterable):
        raise InvalidRequestError(f"{what} must be a list, not {items!r}")
    return list(items)
