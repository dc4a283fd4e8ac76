"""What the router knows of its engines: who has which messages, and how much each has to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

from choreo_agents import Decode
from choreo_agents.engine.delegation import Lineage, Message, Scope
from choreo_agents.errors import InvalidRequestError
from choreo_ray.remote.protocol import EngineClient, HelloReply, Promised, lacked
from choreo_ray.remote.routing import CallToPlace, Costs, EngineAhead, KVToRead, Route, route

_USUAL_SAMPLES = 64
"""Tokens that an answer has, as long as nobody has seen one of its author's."""
_NEVER_COPIED = 1 << 62
"""Bytes of a message that has no row yet to be copied by: it is found where it is, or encoded."""
_WEIGHT = 0.2
"""Of the latest answer in what is expected of the next."""


@dataclass(eq=False)
class Replica:
    """An engine as the router sees it."""

    engine: EngineClient
    total_tokens: int = 0
    kv_budget_bytes: int = 0
    alive: bool = False
    epoch: int = 0
    """How often it has come: what is heard of a life that is over says nothing of this one."""
    leaves: bool = False
    """Whether it is to be ended soon: nothing new is placed there while there are others."""
    held: dict[str, str] = field(default_factory=dict)
    """The tenant's salt of each message that it has for the router, by id."""
    salts: set[str] = field(default_factory=set)
    """Of tenants that it was sent something for."""
    serving: dict[int, int] = field(default_factory=dict)
    """Tokens that are still to be encoded of each request, by number."""
    arriving_bytes: int = 0
    """Of KV on its way there."""
    coming: Counter[str] = field(default_factory=Counter)
    """Messages that it will have for requests placed there, by how many of these bring each."""
    brought: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """What each of these requests brings, by number."""

    @property
    def name(self) -> str:
        """The engine's."""
        return self.engine.name

    def bring(self, number: int, ids: tuple[str, ...]) -> None:
        """A request brings these there, and no others any more."""
        for message_id in self.brought.pop(number, ()):
            self.coming[message_id] -= 1
            if not self.coming[message_id]:
                del self.coming[message_id]
        if ids:
            self.brought[number] = ids
            self.coming.update(ids)


@dataclass(frozen=True)
class PlacementRequest:
    """A request that has to be run somewhere."""

    number: int
    lineage: Lineage
    call: object
    """A `Prefill` or a `Decode`."""
    name: str | None
    """Id of the message, if that is known before."""
    thread: Scope | None


class Fleet:
    """Used under the router's lock.

    Args:
        engines: All that there are, each with a name of its own.
        costs: Of these machines.
        bytes_per_token: Of KV.
        copied_bytes: Of KV that may be on its way at once at most.
    """

    def __init__(self, engines: Sequence[EngineClient], costs: Costs, bytes_per_token: int, copied_bytes: int) -> None:
        self.replicas = {engine.name: Replica(engine) for engine in engines}
        self._route = partial(route, costs=costs)
        self._bytes_per_token = bytes_per_token
        self._copied_bytes = copied_bytes
        self._homes: WeakKeyDictionary[Scope, str] = WeakKeyDictionary()
        self._tenants_homes: dict[str, str] = {}
        """Where calls of no thread were last, by tenant."""
        self.promised: dict[str, str] = {}
        """The engine that was told of each message that nobody had encoded yet, that it is to: by id."""
        self._samples: dict[str | None, float] = {}

    def alive(self) -> list[Replica]:
        """Those that calls can be sent to."""
        return [replica for replica in self.replicas.values() if replica.alive]

    def staying(self) -> list[Replica]:
        """Those of them that are not to be ended soon."""
        return [replica for replica in self.alive() if not replica.leaves]

    def leave(self, name: str) -> list[tuple[str, str, Replica]]:
        """An engine is to be ended soon: what it alone has, its tenant's salt, and to which engine it should go.

        The latest come first.

        Raises:
            InvalidRequestError: There is no such engine, or it is gone, or no other is there.
        """
        replica = self.replicas.get(name)
        if replica is None or not replica.alive:
            known = ", ".join(repr(each.name) for each in self.alive())
            raise InvalidRequestError(f"there is no engine {name!r} now: those that are there are {known}")
        replica.leaves = True
        if not (others := self.staying()):
            replica.leaves = False
            raise InvalidRequestError(
                f"engine {name!r} is the only one that is there and stays: nobody could take over"
            )
        alone = [each for each in reversed(replica.held) if self.holders(each) == [name]]
        load = {each.name: len(each.held) for each in others}
        found: list[tuple[str, str, Replica]] = []
        for message_id in alone:
            least = min(load, key=lambda each: (load[each], each))
            load[least] += 1
            found.append((message_id, replica.held[message_id], self.replicas[least]))
        return found

    def came(self, name: str, greeted: HelloReply, needed: Callable[[str], bool]) -> dict[str, list[str]]:
        """An engine is there; what it has that the router needs no longer, by the tenant's salt.

        Args:
            name: The engine's.
            greeted: What it says.
            needed: Whether the router needs a message, by its id.
        """
        replica = self.replicas[name]
        replica.total_tokens, replica.alive, replica.leaves = greeted.total_tokens, True, False
        replica.epoch += 1
        replica.kv_budget_bytes = greeted.kv_budget_bytes
        replica.salts.update(greeted.held)
        # What calls of before have made meanwhile is in neither list alone.
        replica.held.update({each: salt for salt, held in greeted.held.items() for each in held if needed(each)})
        stale = {salt: [each for each in held if not needed(each)] for salt, held in greeted.held.items()}
        return {salt: ids for salt, ids in stale.items() if ids}

    def lost(self, name: str) -> None:
        """An engine is gone, with all that it had."""
        replica = self.replicas[name]
        replica.alive = False
        replica.held.clear()
        self.promised = {each: engine for each, engine in self.promised.items() if engine != name}
        replica.serving.clear()
        replica.coming.clear()
        replica.brought.clear()

    def close_tenant(self, tenant: str, salt: str) -> list[Replica]:
        """The router serves a tenant no longer: the engines that are to be told."""
        self._tenants_homes.pop(tenant, None)
        told = [replica for replica in self.alive() if salt in replica.salts]
        for replica in self.replicas.values():
            replica.salts.discard(salt)
            for message_id in [each for each, whose in replica.held.items() if whose == salt]:
                del replica.held[message_id]
        return told

    def place(self, wish: PlacementRequest, tried: Collection[str] = ()) -> Route | None:
        """Where a request is run; it counts as begun there. None: nowhere now.

        Args:
            wish: The request.
            tried: Engines that were lost with it.
        """
        there = self.staying() or self.alive()
        engines = [replica for replica in there if replica.name not in tried] or there
        if not engines:
            return None
        reads = [self._read(parent) for parent in wish.lineage.parents]
        if wish.name is not None and (known := self.holders(wish.name)):
            reads.append(KVToRead(wish.name, _NEVER_COPIED, known))
        call = CallToPlace(reads, len(wish.lineage.tokens), self._expected(wish.call), self._home(wish))
        again = _Lacked(wish)
        found = self._route(call, [self._ahead(replica, again) for replica in engines])
        self.replicas[found.engine].serving[wish.number] = len(wish.lineage.tokens) + found.tokens_encoded
        self.replicas[found.engine].arriving_bytes += found.bytes_copied
        self.replicas[found.engine].bring(
            wish.number, tuple(read.id for read in reads if found.engine not in read.holders)
        )
        if wish.thread is None:
            self._tenants_homes[wish.lineage.tenant] = found.engine
        else:
            self._homes[wish.thread] = found.engine
        return found

    def holders(self, message_id: str) -> list[str]:
        """The engines that have a message's KV, as far as is known: not those that a call has begun to bring it to."""
        return [each.name for each in self.alive() if message_id in each.held and message_id not in each.coming]

    def holds(self, name: str, ids: Mapping[str, str]) -> None:
        """An engine has messages for the router: their tenants' salts, by id."""
        self.replicas[name].salts.update(ids.values())
        self.replicas[name].held.update(ids)

    def kept(self, known: Callable[[str], Message | None], tenant: str | None) -> int:
        """Bytes of KV of a tenant's messages, or of all, that engines have for the router: each as often as it is
        there.

        Args:
            known: Finds a message by its id.
            tenant: Whose; None: all tenants'.
        """
        held = (known(message_id) for replica in self.alive() for message_id in replica.held)
        counting = (each for each in held if each is not None and tenant in (None, each.tenant))
        return self._bytes_per_token * sum(len(each.tokens) for each in counting)

    def first_told(self, name: str, ids: Mapping[str, Promised]) -> dict[str, Promised]:
        """Those of messages that nobody has encoded yet that this engine is the first to be told of."""
        return {each: promise for each, promise in ids.items() if self.promised.setdefault(each, name) == name}

    def dropped(self, message_id: str) -> list[tuple[Replica, str]]:
        """The router needs a message no longer: the engines that are to be told, with the tenant's salt."""
        self.promised.pop(message_id, None)
        found: list[tuple[Replica, str]] = []
        for replica in self.replicas.values():
            if (salt := replica.held.pop(message_id, None)) is not None:
                found.append((replica, salt))
        return found

    def encoded(self, name: str, number: int) -> None:
        """A request has encoded what was given, and all that it reads is there."""
        if number in self.replicas[name].serving:
            self.replicas[name].serving[number] = 0
        self.replicas[name].bring(number, ())

    def arrived(self, name: str, nbytes: int) -> None:
        """KV that was on its way there is so no longer."""
        self.replicas[name].arriving_bytes -= nbytes

    def ended(self, name: str, number: int, call: object = None, sampled: int = 0) -> None:
        """A request runs there no longer."""
        self.replicas[name].serving.pop(number, None)
        self.replicas[name].bring(number, ())
        if sampled and isinstance(call, Decode):
            before = self._samples.get(call.author, float(sampled))
            self._samples[call.author] = before + _WEIGHT * (sampled - before)

    def _read(self, message: Message) -> KVToRead:
        nbytes = len(message.tokens) * self._bytes_per_token
        return KVToRead(message.handle.id, nbytes, dict.fromkeys(self.holders(message.handle.id)))

    def _ahead(self, replica: Replica, again: _Lacked) -> EngineAhead:
        room = max(0, self._copied_bytes - replica.arriving_bytes)
        ahead, rows, coming = sum(replica.serving.values()), len(replica.serving), replica.coming.keys()
        return EngineAhead(replica.name, rows, ahead, again.by(replica), room, coming, len(replica.held))

    def _expected(self, call: object) -> float:
        if not isinstance(call, Decode):
            return 0.0
        most = (
            call.sampling.max_tokens if call.sampling.forced_token_ids is None else len(call.sampling.forced_token_ids)
        )
        return float(min(most, self._samples.get(call.author, _USUAL_SAMPLES)))

    def _home(self, wish: PlacementRequest) -> str | None:
        """Where its thread was last; calls of no thread are taken for one: what comes next may read them all."""
        if wish.thread is None:
            return self._tenants_homes.get(wish.lineage.tenant)
        return self._homes.get(wish.thread)


class _Lacked:
    """What engines would have to encode again for one call; those that have the same of what it comes from share it.

    Args:
        wish: The call.
    """

    def __init__(self, wish: PlacementRequest) -> None:
        self._wish = wish
        self._behind: dict[tuple[str, ...], frozenset[str]] = {}
        """All that messages come from, these included, by their ids."""
        self._found: dict[tuple[tuple[str, ...], frozenset[str]], dict[str, int]] = {}

    def by(self, replica: Replica) -> Mapping[str, int]:
        """Tokens, for each message that an engine lacks (see `EngineAhead.again`)."""
        held, coming, parents = replica.held, replica.coming, self._wish.lineage.parents
        lacking = [each for each in parents if each.handle.id not in held and each.handle.id not in coming]
        ids = tuple(each.handle.id for each in lacking)
        if ids not in self._behind:
            self._behind[ids] = frozenset(each.handle.id for each in lacked(lacking, ()))
        behind = self._behind[ids]
        there = frozenset((behind & held.keys()) | (behind & coming.keys()))
        if (ids, there) not in self._found:
            self._found[ids, there] = self._counted(lacking, there)
        return self._found[ids, there]

    def _counted(self, lacking: Sequence[Message], there: Collection[str]) -> dict[str, int]:
        again: dict[str, int] = {}
        known = set(there)
        for parent in lacking:
            behind = lacked([parent], known)
            again[parent.handle.id] = sum(len(each.tokens) for each in behind)
            known.update(each.handle.id for each in behind)
        if self._wish.name is not None:
            again[self._wish.name] = len(self._wish.lineage.tokens)
        return again
