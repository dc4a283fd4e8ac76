"""State of a router's engines: which messages each of them has, and how much it has to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

from choreo_agents import Decode
from choreo_agents.engine import Scope
from choreo_agents.engine.delegation import Message, Promised
from choreo_agents.errors import InvalidRequestError
from choreo_ray.remote.protocol import EngineClient, HelloReply, missing_lineage
from choreo_ray.remote.routing import CallToPlace, Costs, EngineAhead, KVToRead, Route, route

_USUAL_SAMPLES = 64
"""Tokens that an answer is expected to have before one of its author is known."""
_NEVER_COPIED = 1 << 62
"""Bytes of a message that has no lineage record yet, and cannot be copied: it is read where it is, or encoded."""
_WEIGHT = 0.2
"""Weight of the latest answer in the expected length of the next."""


@dataclass(eq=False)
class Replica:
    """An engine as the router sees it."""

    engine: EngineClient
    total_tokens: int = 0
    kv_budget_bytes: int = 0
    alive: bool = False
    epoch: int = 0
    """Number of times that it has come up: what belongs to an earlier epoch says nothing about this one."""
    leaves: bool = False
    """Whether it is being drained: nothing new is placed there while there are others."""
    held: dict[str, str] = field(default_factory=dict)
    """Tenant's salt of each message that it has for the router, by id."""
    salts: set[str] = field(default_factory=set)
    """Salts of tenants that it was sent something for."""
    serving: dict[int, int] = field(default_factory=dict)
    """Tokens that are still to be encoded for each request, by number."""
    arriving_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of KV on their way there for each request, by number."""
    incoming: Counter[str] = field(default_factory=Counter)
    """Messages that it will have for requests placed there, with the number of requests that bring each."""
    brought: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Messages that each of these requests brings, by number."""

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.engine.name

    def bring(self, number: int, ids: tuple[str, ...]) -> None:
        """Note the messages that a request brings there, which replace those noted before."""
        for message_id in self.brought.pop(number, ()):
            self.incoming[message_id] -= 1
            if not self.incoming[message_id]:
                del self.incoming[message_id]
        if ids:
            self.brought[number] = ids
            self.incoming.update(ids)


@dataclass(frozen=True)
class PlacementRequest:
    """A request that has to be placed."""

    number: int
    parents: Sequence[Message]
    tokens: int
    """Tokens of its own prompt."""
    tenant: str
    call: object
    """A `Prefill` or a `Decode`."""
    name: str | None
    """Id of the message, if it is known before."""
    thread: Scope | None


class Fleet:
    """The engines of a router. Used under the router's lock.

    Args:
        engines: All engines, each with a name of its own.
        costs: Costs on these machines.
        bytes_per_token: Bytes of KV per token.
        copied_bytes: Most bytes of KV that may be on their way to one engine at once.
    """

    def __init__(self, engines: Sequence[EngineClient], costs: Costs, bytes_per_token: int, copied_bytes: int) -> None:
        self.replicas = {engine.name: Replica(engine) for engine in engines}
        self._route = partial(route, costs=costs)
        self._bytes_per_token = bytes_per_token
        self._copied_bytes = copied_bytes
        self._homes: WeakKeyDictionary[Scope, str] = WeakKeyDictionary()
        self._tenants_homes: dict[str, str] = {}
        """Engine of the last call without a thread, by tenant."""
        self.promised: dict[str, str] = {}
        """Engine that was told to encode each message that nobody has encoded yet, by id."""
        self._samples: dict[str | None, float] = {}

    def alive(self) -> list[Replica]:
        """Return the engines that calls can be sent to."""
        return [replica for replica in self.replicas.values() if replica.alive]

    def staying(self) -> list[Replica]:
        """Return the engines that calls can be sent to and that are not being drained."""
        return [replica for replica in self.alive() if not replica.leaves]

    def leave(self, name: str) -> list[tuple[str, str, Replica]]:
        """Begin to drain an engine; return each message that only it has, its tenant's salt, and the engine to copy it
        to.

        The latest come first.

        Raises:
            InvalidRequestError: There is no such engine, or it is gone, or no other is up.
        """
        replica = self.replicas.get(name)
        if replica is None or not replica.alive:
            names = ", ".join(repr(replica.name) for replica in self.alive())
            raise InvalidRequestError(f"there is no engine {name!r}: use one of {names}")
        replica.leaves = True
        if not (targets := self.staying()):
            replica.leaves = False
            raise InvalidRequestError(f"engine {name!r} is the only one that is up: no other could take over")
        alone = [message_id for message_id in reversed(replica.held) if self.holders(message_id) == [name]]
        load = {target.name: len(target.held) for target in targets}
        moves: list[tuple[str, str, Replica]] = []
        for message_id in alone:
            least = min(load, key=lambda target: (load[target], target))
            load[least] += 1
            moves.append((message_id, replica.held[message_id], self.replicas[least]))
        return moves

    def came(self, name: str, reply: HelloReply, is_needed: Callable[[str], bool]) -> dict[str, list[str]]:
        """Mark an engine as up; return the messages that it has and the router no longer needs, by the tenant's salt.

        Args:
            name: Name of the engine.
            reply: Its answer to the greeting.
            is_needed: Returns whether the router needs a message, by its id.
        """
        replica = self.replicas[name]
        replica.total_tokens, replica.alive, replica.leaves = reply.total_tokens, True, False
        replica.epoch += 1
        replica.kv_budget_bytes = reply.kv_budget_bytes
        replica.salts.update(reply.held)
        # Calls of before may have made messages meanwhile, which are in neither list alone.
        replica.held.update({key: salt for salt, ids in reply.held.items() for key in ids if is_needed(key)})
        stale = {salt: [key for key in ids if not is_needed(key)] for salt, ids in reply.held.items()}
        return {salt: ids for salt, ids in stale.items() if ids}

    def lost(self, name: str) -> None:
        """Mark an engine as gone, with all that it had."""
        replica = self.replicas[name]
        replica.alive = False
        replica.held.clear()
        self.promised = {message_id: engine for message_id, engine in self.promised.items() if engine != name}
        replica.serving.clear()
        replica.incoming.clear()
        replica.brought.clear()

    def close_tenant(self, tenant: str, salt: str) -> list[Replica]:
        """Forget a tenant; return the engines that have to close it."""
        self._tenants_homes.pop(tenant, None)
        informed = [replica for replica in self.alive() if salt in replica.salts]
        for replica in self.replicas.values():
            replica.salts.discard(salt)
            for message_id in [message_id for message_id, owner_salt in replica.held.items() if owner_salt == salt]:
                del replica.held[message_id]
        return informed

    def place(self, request: PlacementRequest, tried: Collection[str] = ()) -> Route | None:
        """Choose an engine for a request, and count the request there; None: no engine is up.

        Args:
            request: The request.
            tried: Names of engines that were lost while they ran it.
        """
        candidates = self.staying() or self.alive()
        engines = [replica for replica in candidates if replica.name not in tried] or candidates
        if not engines:
            return None
        reads = [self._read(parent) for parent in request.parents]
        if request.name is not None and (holders := self.holders(request.name)):
            reads.append(KVToRead(request.name, _NEVER_COPIED, holders))
        call = CallToPlace(reads, request.tokens, self._expected(request.call), self._home(request))
        reencoded = _ReencodedTokens(request)
        chosen = self._route(call, [self._ahead(replica, reencoded) for replica in engines])
        self.replicas[chosen.engine].serving[request.number] = request.tokens + chosen.tokens_encoded
        self.replicas[chosen.engine].arriving_bytes[request.number] = chosen.bytes_copied
        self.replicas[chosen.engine].bring(
            request.number, tuple(read.id for read in reads if chosen.engine not in read.holders)
        )
        if request.thread is None:
            self._tenants_homes[request.tenant] = chosen.engine
        else:
            self._homes[request.thread] = chosen.engine
        return chosen

    def holders(self, message_id: str) -> list[str]:
        """Return the engines known to have a message's KV, without those that a call is still bringing it to."""
        return [peer.name for peer in self.alive() if message_id in peer.held and message_id not in peer.incoming]

    def holds(self, name: str, ids: Mapping[str, str]) -> None:
        """Note messages that an engine has for the router: their tenants' salts, by id."""
        self.replicas[name].salts.update(ids.values())
        self.replicas[name].held.update(ids)

    def held_bytes(self, find: Callable[[str], Message | None], tenant: str | None) -> int:
        """Return the bytes of KV of a tenant's messages, or of all, that engines hold for the router, all copies
        included.

        Args:
            find: Finds a message by its id.
            tenant: Name of the tenant; None: all tenants.
        """
        messages = (find(message_id) for replica in self.alive() for message_id in replica.held)
        counting = (message for message in messages if message is not None and tenant in (None, message.tenant))
        return self._bytes_per_token * sum(len(message.tokens) for message in counting)

    def claim_promised(self, name: str, ids: Mapping[str, Promised]) -> dict[str, Promised]:
        """Return those of the messages, which nobody has encoded yet, that this engine is the first to be told of."""
        return {key: promise for key, promise in ids.items() if self.promised.setdefault(key, name) == name}

    def drop_message(self, message_id: str) -> list[tuple[Replica, str]]:
        """Forget a message; return the engines that have to release it, with the tenant's salt."""
        self.promised.pop(message_id, None)
        salts = [(replica, replica.held.pop(message_id, None)) for replica in self.replicas.values()]
        return [(replica, salt) for replica, salt in salts if salt is not None]

    def encoded(self, name: str, number: int) -> None:
        """Note that a request has encoded its tokens, and that all it reads is there."""
        if number in self.replicas[name].serving:
            self.replicas[name].serving[number] = 0
        self.replicas[name].bring(number, ())

    def arrived(self, name: str, number: int) -> None:
        """Stop counting the KV that is copied for a request as on its way to an engine."""
        self.replicas[name].arriving_bytes.pop(number, None)

    def ended(self, name: str, number: int, call: object = None, sampled: int = 0) -> None:
        """Stop counting a request at an engine, and learn from the length of its answer."""
        self.replicas[name].serving.pop(number, None)
        self.arrived(name, number)
        self.replicas[name].bring(number, ())
        if sampled and isinstance(call, Decode):
            before = self._samples.get(call.author, float(sampled))
            self._samples[call.author] = before + _WEIGHT * (sampled - before)

    def _read(self, message: Message) -> KVToRead:
        nbytes = len(message.tokens) * self._bytes_per_token
        return KVToRead(message.handle.id, nbytes, dict.fromkeys(self.holders(message.handle.id)))

    def _ahead(self, replica: Replica, reencoded: _ReencodedTokens) -> EngineAhead:
        room = max(0, self._copied_bytes - sum(replica.arriving_bytes.values()))
        ahead, rows, incoming = sum(replica.serving.values()), len(replica.serving), replica.incoming.keys()
        return EngineAhead(replica.name, rows, ahead, reencoded.by(replica), room, incoming, len(replica.held))

    def _expected(self, call: object) -> float:
        if not isinstance(call, Decode):
            return 0.0
        most = (
            call.sampling.max_tokens if call.sampling.forced_token_ids is None else len(call.sampling.forced_token_ids)
        )
        return float(min(most, self._samples.get(call.author, _USUAL_SAMPLES)))

    def _home(self, request: PlacementRequest) -> str | None:
        """Return the engine where the thread was last; calls without one share a home, as the next may read them
        all.
        """
        if request.thread is None:
            return self._tenants_homes.get(request.tenant)
        return self._homes.get(request.thread)


class _ReencodedTokens:
    """Tokens that engines would encode again for one call. Engines that have the same ancestors share one count.

    Args:
        request: The call.
    """

    def __init__(self, request: PlacementRequest) -> None:
        self._request = request
        self._ancestors: dict[tuple[str, ...], frozenset[str]] = {}
        """All ancestors of missing messages, these included, by the ids of the missing ones."""
        self._counts: dict[tuple[tuple[str, ...], frozenset[str]], dict[str, int]] = {}

    def by(self, replica: Replica) -> Mapping[str, int]:
        """Return the tokens to encode again for each message that an engine lacks (see `EngineAhead.again`)."""
        held, incoming, parents = replica.held, replica.incoming, self._request.parents
        missing = [parent for parent in parents if parent.handle.id not in held and parent.handle.id not in incoming]
        ids = tuple(message.handle.id for message in missing)
        if ids not in self._ancestors:
            self._ancestors[ids] = frozenset(message.handle.id for message in missing_lineage(missing, ()))
        ancestors = self._ancestors[ids]
        present = frozenset((ancestors & held.keys()) | (ancestors & incoming.keys()))
        if (ids, present) not in self._counts:
            self._counts[ids, present] = self._count(missing, present)
        return self._counts[ids, present]

    def _count(self, missing: Sequence[Message], present: Collection[str]) -> dict[str, int]:
        counts: dict[str, int] = {}
        known_ids = set(present)
        for parent in missing:
            ancestors = missing_lineage([parent], known_ids)
            counts[parent.handle.id] = sum(len(message.tokens) for message in ancestors)
            known_ids.update(message.handle.id for message in ancestors)
        if self._request.name is not None:
            counts[self._request.name] = self._request.tokens
        return counts
