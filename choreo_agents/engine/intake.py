"""Reads calls: finds and places their parents, refuses what can never work, names the rest."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict

from choreo_agents.engine.calls import Content, Decode, Prefill
from choreo_agents.engine.ledger import Ledger
from choreo_agents.engine.methods import Job, Method
from choreo_agents.engine.placement import place
from choreo_agents.errors import ContextLengthError, InvalidRequestError, KVBudgetError
from choreo_agents.kv.handle import message_id
from choreo_agents.kv.pool import KVPool
from choreo_agents.models import LoadedModel
from choreo_agents.runtime.request import Decoding
from choreo_agents.sampling import Sampling, TokenSampler

_REMEMBERED_CALLS = 65_536


class Intake:
    """Turns calls into jobs before any work is done. Used under the engine's lock.

    Args:
        model: Tokenizer, vocabulary and context length.
        ledger: Where parents are found.
        pool: Whose size bounds a call.
        method: What a call will need.
        seed: From which the seeds of calls without one are derived.
        salt: The tenant's.
    """

    def __init__(
        self, model: LoadedModel, ledger: Ledger, pool: KVPool, method: Method, *, seed: int, salt: bytes
    ) -> None:
        self._model = model
        self._ledger = ledger
        self._pool = pool
        self._method = method
        self._seed = seed
        self._key = hmac.new(b"choreo", salt, hashlib.sha256).digest()
        self._repeats: OrderedDict[str, int] = OrderedDict()

    def prefill(self, call: Prefill) -> Job:
        """The job of a prefill; raises what `Engine.prefill` raises."""
        job = self._job(call.content, call, "nothing to prefill: the content is empty")
        self._require_fit(job, 0)
        return job

    def decode(self, call: Decode) -> tuple[Job, Decoding]:
        """The job of a decode and how it samples; raises what `Engine.decode` raises."""
        job = self._job(
            call.header, call, "the header is empty: the first token is sampled from what its last token encodes"
        )
        sampling, closing = call.sampling, self._tokens(call.closing)
        self._tokens(sampling.forced or ())
        stops = sampling.stop_tokens
        if stops is None:
            stops = (*self._model.adapter.end_tokens, *closing[:1])
        seed = self._call_seed(job, sampling) if sampling.seed is None else sampling.seed
        decoding = Decoding(sampling, TokenSampler(sampling, seed), frozenset(stops), closing)
        self._require_fit(job, decoding.longest)
        return job, decoding

    def identity(self, job: Job, tokens: tuple[int, ...]) -> str:
        """The id of the message that these tokens make in the job's place."""
        parents = [parent.handle.id for parent in job.parents]
        return message_id(self._key, self._model.adapter.fingerprint, tokens, parents, job.placement.relative())

    def memo(self, job: Job, call: Decode, decoding: Decoding) -> str | None:
        """Under which the answer to this very call is remembered."""
        if call.memo is None:
            return None
        closing = ",".join(map(str, decoding.closing))
        return f"{call.memo} {self.identity(job, job.tokens)} {call.sampling.model_dump_json()} {closing}"

    def _job(self, content: Content, call: Prefill | Decode, if_empty: str) -> Job:
        tokens = self._tokens(content)
        if not tokens:
            raise InvalidRequestError(if_empty)
        parents = tuple(self._ledger.find(parent) for parent in call.parents)
        return Job(tokens, parents, place([len(parent.tokens) for parent in parents], call.offsets, call.new_offset))

    def _tokens(self, content: Content) -> tuple[int, ...]:
        tokens = tuple(self._model.encode(content) if isinstance(content, str) else content)
        size = self._model.adapter.vocabulary_size
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise InvalidRequestError(f"{token!r} is no token: ids run from 0 to {size - 1}")
        return tokens

    def _require_fit(self, job: Job, added: int) -> None:
        end, most = self._method.reach(job, added), self._model.adapter.max_positions
        if end > most:
            raise ContextLengthError(
                f"the view and its new message reach position {end}, the model's context ends at {most}: "
                "show fewer or shorter messages, or lower max_tokens"
            )
        room = self._pool.rounded(self._method.room(job, added))
        if room > self._pool.total_tokens:
            raise KVBudgetError(
                f"the call needs KV memory for {room} tokens, the engine has {self._pool.total_tokens} in all: "
                "load it with a larger kv_budget_bytes, or lower max_tokens"
            )

    def _call_seed(self, job: Job, sampling: Sampling) -> int:
        """Different for each repetition of a call, the same in each run of a program."""
        call = f"{self.identity(job, job.tokens)} {sampling.model_dump_json()}"
        repeat = self._repeats.pop(call, 0)
        self._repeats[call] = repeat + 1
        while len(self._repeats) > _REMEMBERED_CALLS:
            self._repeats.popitem(last=False)
        digest = hashlib.sha256(f"{self._seed} {repeat} {call}".encode()).digest()
        return int.from_bytes(digest[:7], "big")
