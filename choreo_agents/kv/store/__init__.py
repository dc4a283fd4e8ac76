"""KV below the pool, in sealed files within a budget that the longest unused leaves."""

from choreo_agents.kv.store.key import KVKey
from choreo_agents.kv.store.store import KVStore
from choreo_agents.kv.store.writer import KVWriter

__all__ = ["KVKey", "KVStore", "KVWriter"]
