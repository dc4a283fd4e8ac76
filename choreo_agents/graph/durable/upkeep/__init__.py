"""What keeps a store of lineage in order: `check_store` reads all of it, `compact_store` deletes what nobody needs.

Read `listing`, how a store is read from end to end, then `checking` and `compacting`.
"""

from choreo_agents.graph.durable.upkeep.checking import FINDINGS, StoreFinding, StoreReport, acheck_store, check_store
from choreo_agents.graph.durable.upkeep.compacting import CompactedStore, acompact_store, compact_store
from choreo_agents.graph.durable.upkeep.opening import store_at

__all__ = [
    "FINDINGS",
    "CompactedStore",
    "StoreFinding",
    "StoreReport",
    "acheck_store",
    "acompact_store",
    "check_store",
    "compact_store",
    "store_at",
]
