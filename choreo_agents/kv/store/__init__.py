"""Signed KV files, kept within a budget by removing the least recently used."""

from choreo_agents.kv.store.key import KVKey
from choreo_agents.kv.store.store import KVStore

__all__ = ["KVKey", "KVStore"]
