"""Internal names for an `Execution` of another distribution that runs an engine's calls in other processes.

`choreo-ray` imports these and no other internals; its import contract fails for any more. They are not public and
change with every version, so both must have the same version. Start with `Execution` in `choreo_agents.engine.core`,
which says what an implementer provides.

    engine      EngineCore, Execution, EngineAdmin, Tenant, Settings, Computing
    adapters    read_loaded
   messages    Message, Lineage, MessageIds, Scope, MessageTable
    lineage     LineageRow, ReadLog, LineageExchange, row_of
   requests    PlacedCall, Pending, Request, Binding, Completion, failed
    KV          KVCache, CacheEntry, Segment, HostKV, copied, filled
    sealed KV   KVKey, kv_key, sealed, in_bytes, parsed, opened, kv_bytes, most_bytes, UnusableFileError
    model       ServedModel, served_model, load_weightless
"""

from choreo_agents.engine.adapters import read_loaded
from choreo_agents.engine.calling import Tenant
from choreo_agents.engine.core import Computing, EngineCore, Execution
from choreo_agents.engine.engine import EngineAdmin
from choreo_agents.engine.lineage import LineageExchange, LineageRow, ReadLog, row_of
from choreo_agents.engine.messages.message import Lineage, Message, MessageIds, Scope
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.engine.persistent_kv import copied, kv_key
from choreo_agents.engine.request_builder import Pending, PlacedCall
from choreo_agents.engine.settings import Settings
from choreo_agents.engine.transfer import filled
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.store import KVKey
from choreo_agents.kv.store.format import UnusableFileError, in_bytes, kv_bytes, most_bytes, opened, parsed, sealed
from choreo_agents.kv.tiers import HostKV
from choreo_agents.models.weightless import ServedModel, load_weightless, served_model
from choreo_agents.runtime.active_requests import Completion, failed
from choreo_agents.runtime.request import Binding, Request

__all__ = [
    "Binding",
    "CacheEntry",
    "Completion",
    "Computing",
    "EngineAdmin",
    "EngineCore",
    "Execution",
    "HostKV",
    "KVCache",
    "KVKey",
    "Lineage",
    "LineageExchange",
    "LineageRow",
    "Message",
    "MessageIds",
    "MessageTable",
    "Pending",
    "PlacedCall",
    "ReadLog",
    "Request",
    "Scope",
    "Segment",
    "ServedModel",
    "Settings",
    "Tenant",
    "UnusableFileError",
    "copied",
    "failed",
    "filled",
    "in_bytes",
    "kv_bytes",
    "kv_key",
    "load_weightless",
    "most_bytes",
    "opened",
    "parsed",
    "read_loaded",
    "row_of",
    "sealed",
    "served_model",
]
