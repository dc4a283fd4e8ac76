"""Engines elsewhere: one that knows all messages, and has others compute them.

front       tenants, handles, leases, memos, lineage: all that an engine knows, and no KV
elsewhere   engines with KV, each given calls with the lineage of what it does not know yet

Read `sending`, what goes to and fro, then `errand`, what is done for a request, and `serving`, where it is run;
`routing` says where that is, and `parcels` brings KV from one of them to another.
"""

from choreo_agents.engine.elsewhere.core import RemoteExecution
from choreo_agents.engine.elsewhere.front import COPIED_BYTES, FrontOptions, front_of
from choreo_agents.engine.elsewhere.parcels import Parcel, packed, unpacked
from choreo_agents.engine.elsewhere.routing import Costs
from choreo_agents.engine.elsewhere.sending import (
    Copying,
    FarEngine,
    Greeted,
    Greeting,
    Releasing,
    SentAdapter,
    SentAnswer,
    SentCall,
)
from choreo_agents.engine.elsewhere.serving import EngineServer

__all__ = [
    "COPIED_BYTES",
    "Copying",
    "Costs",
    "EngineServer",
    "FarEngine",
    "FrontOptions",
    "Greeted",
    "Greeting",
    "Parcel",
    "Releasing",
    "RemoteExecution",
    "SentAdapter",
    "SentAnswer",
    "SentCall",
    "front_of",
    "packed",
    "unpacked",
]
