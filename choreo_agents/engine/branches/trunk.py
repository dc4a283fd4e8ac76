"""What merging has to know of branches: what they have all seen, and who keeps copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from choreo_agents.engine.adapters import BASE
from choreo_agents.engine.calls import Prefill
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.tenant import Tenant
from choreo_agents.errors import HandleError
from choreo_agents.kv.handle import MessageHandle


def maps(tenant: Tenant, adapter: str | None) -> bool:
    """Whether an adapter has a cache mapper, and the engine caches to be mapped.

    Raises:
        AdapterError: There is no such adapter.
    """
    core = tenant.core
    with core.lock:
        tenant.require_tenancy()
        return bool(core.adapters.mapper_key(adapter, tenant.name)) and core.method.keeps_kv


def boundaries(
    tenant: Tenant,
    branches: Sequence[MessageHandle],
    trunk: Sequence[MessageHandle],
    offsets: Sequence[int],
    anchors: Sequence[int],
    adapter: str | None,
) -> list[Prefill]:
    """For each branch, what an adapter reads behind it (see `Branches.boundaries`)."""
    core = tenant.core
    with core.lock:
        if not (core.adapters.boundaries(adapter, tenant.name) and core.method.keeps_kv):
            return []
        said = [tenant.find(branch).tokens for branch in branches]
    openings = [core.model.opening(tokens) for tokens in said]
    if not all(openings):
        return []
    ends = [at + handle.length for handle, at in zip(trunk, offsets, strict=True)]
    calls: list[Prefill] = []
    for opening, branch, anchor in zip(openings, branches, anchors, strict=True):
        start = min(anchor, max(ends, default=0))
        seen = [(handle, at) for handle, at, end in zip(trunk, offsets, ends, strict=True) if end <= start]
        handles, places = [handle for handle, _ in seen], [at for _, at in seen]
        calls.append(Prefill(opening, [*handles, branch], [*places, start], start + branch.length, adapter=adapter))
    return calls


def shared_trunk(tenant: Tenant, branches: Sequence[MessageHandle], scope: Scope | None) -> list[MessageHandle]:
    """What all branches see from the start of their views on, each with a new lease: to be released."""
    with tenant.core.lock:
        views = [_original(tenant.find(branch)).parents for branch in branches]
        alike = takewhile(lambda each: len(set(map(id, each))) == 1, zip(*views, strict=False))
        return _leased(tenant, [each[0] for each in alike], scope)


def _original(message: Message) -> Message:
    """What a mapped copy is a copy of; any other message itself."""
    while message.lineage.mapper:
        [message] = message.parents
    return message


def depths(tenant: Tenant, branches: Sequence[MessageHandle], trunk: Sequence[MessageHandle]) -> list[int]:
    """How many trunk messages each branch had seen when it was encoded; of one that saw none of them, all.

    Raises:
        HandleError: One of them is unknown, released, or another model's.
    """
    with tenant.core.lock:
        found: list[int] = []
        shared = [tenant.find(handle) for handle in trunk]
        for branch in branches:
            seen = set(tenant.find(branch).ancestors())
            deepest = [place for place, message in enumerate(shared, start=1) if message in seen]
            found.append(max(deepest, default=len(trunk)))
        return found


def view_of(tenant: Tenant, branch: MessageHandle, scope: Scope | None) -> list[tuple[MessageHandle, int]]:
    """What a branch attended to and itself last, with offsets; all but itself with a new lease: to be released."""
    with tenant.core.lock:
        said = _original(tenant.find(branch))
        seen = _leased(tenant, said.parents, scope)
        start = said.native_offset
        offsets = [start + offset for offset in said.relative_offsets]
        return [*zip(seen, offsets, strict=True), (branch, start)]


def keep(
    tenant: Tenant, sources: Sequence[MessageHandle], copies: Sequence[MessageHandle], scope: Scope | None
) -> None:
    """Let copies live as long as their sources: the leases that their maker has are the sources' from now on.

    If the maker's scope has ended meanwhile, its leases have, too: those of others are left to them.

    Raises:
        HandleError: A source was released meanwhile; nothing is kept.
    """
    with tenant.core.lock:
        if scope is not None and scope.closed:
            return
        table, made = tenant.core.table, [tenant.find(copy) for copy in copies]
        try:
            found = [tenant.find(source) for source in sources]
        except HandleError:
            for copy in made:
                table.release(copy, scope)
            raise
        for source, copy in zip(found, made, strict=True):
            table.keep(source, copy, scope)


def speaker(tenant: Tenant, branch: MessageHandle) -> tuple[Message, str]:
    """What a branch was as its speaker said it, and the name of the adapter that encoded it, to be given to a call."""
    with tenant.core.lock:
        said = _original(tenant.find(branch))
        return said, tenant.core.adapters.name_of(said.lineage.adapter, tenant.name) or BASE


def _leased(tenant: Tenant, messages: Sequence[Message], scope: Scope | None) -> list[MessageHandle]:
    for message in messages if scope is None or not scope.closed else ():
        tenant.core.table.lease(message, scope)
    return [message.handle for message in messages]
