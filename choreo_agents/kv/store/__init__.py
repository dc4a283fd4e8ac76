"""Signed KV files, kept within a budget by removing the least recently used."""

from choreo_agents.kv.store.key import KVKey
from choreo_agents.kv.store.store import KVStore
from choreo_agents.kv.store.writer import KVWriter

__all__ = ["KVKey", "KVStore", "KVWriter"]
