"""What a store of lineage holds, by names alone: who has rows, notes and holders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from langgraph.store.base import BaseStore

from choreo_agents.engine.lineage import FORMAT
from choreo_agents.graph.durable.upkeep.listing import StoredEntry, listed

OnProgress = Callable[[int], None]
"""Is told how many entries have been read."""
_DEPTHS = {"rows": 3, "notes": 5, "answers": 4, "holders": 4, "leaving": 3}
"""How many names lead to entries of each kind."""


@dataclass
class TenantContents:
    """Of one tenant. Messages by id, threads by their names in the store."""

    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The parents of each row; none of one that cannot be read."""
    notes: dict[str, set[str]] = field(default_factory=dict)
    """The messages of which each thread has notes."""
    answers: dict[str, set[str]] = field(default_factory=dict)
    """What each thread's calls were answered stands under these."""
    holders: dict[str, set[str]] = field(default_factory=dict)
    """The threads that hold each message."""
    leaving: set[str] = field(default_factory=set)
    written: dict[str, datetime] = field(default_factory=dict)
    """When each thread has last written a note."""
    foreign: set[tuple[str, str]] = field(default_factory=set)
    """Kind and id of what another release has written: we do not know what it means by it."""

    def held(self) -> Iterator[tuple[str, str]]:
        """Id and thread of everything that is held."""
        return ((each, thread) for each, threads in self.holders.items() for thread in threads)


async def contents_of(
    store: BaseStore,
    on_entry: Callable[[StoredEntry, TenantContents | None], None] = lambda entry, tenant: None,
    on_progress: OnProgress = lambda done: None,
) -> dict[str, TenantContents]:
    """What a store holds, by tenant.

    Args:
        store: LangGraph's.
        on_entry: Is told of each value, and of the contents of its tenant; None: it stands where nothing of ours does.
        on_progress: See `OnProgress`.

    Raises:
        StoreError: The store has failed.
    """
    found: dict[str, TenantContents] = {}
    done = 0
    async for page in listed(store):
        for entry in page:
            tenant = _noted(entry, found)
            on_entry(entry, tenant)
        done += len(page)
        on_progress(done)
    return found


def message_of(entry: StoredEntry) -> str:
    """The id of the message that an entry is of; of an answer, what that stands under."""
    _, kind, *_ = entry.namespace
    return entry.namespace[-1] if kind in ("notes", "holders") else entry.key


def _noted(entry: StoredEntry, found: dict[str, TenantContents]) -> TenantContents | None:
    _, kind, *names = entry.namespace if len(entry.namespace) > 1 else (*entry.namespace, "")
    if len(entry.namespace) != _DEPTHS.get(kind):
        return None
    tenant = found.setdefault(names[0], TenantContents())
    if entry.value is not None and entry.value.get("v") != FORMAT:
        tenant.foreign.add((kind, message_of(entry)))
    if kind == "rows":
        tenant.rows[entry.key] = ()
    elif kind == "notes":
        tenant.notes.setdefault(names[1], set()).add(message_of(entry))
        tenant.written[names[1]] = max(tenant.written.get(names[1], entry.written), entry.written)
    elif kind == "answers":
        tenant.answers.setdefault(names[1], set()).add(entry.key)
    elif kind == "holders":
        tenant.holders.setdefault(names[1], set()).add(entry.key)
    else:
        tenant.leaving.add(entry.key)
    return tenant
