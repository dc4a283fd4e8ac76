"""Engines elsewhere: one that knows all messages, and has others compute them.

front       tenants, handles, leases, memos, lineage: all that an engine knows, and no KV
elsewhere   engines with KV, each given calls with the lineage of what it does not know yet

Read `sending`, what goes to and fro, then `errand`, what is done for a request, and `serving`, where it is run;
`routing` says where that is.
"""

from choreo_agents.engine.elsewhere.core import COPIED_BYTES, FRONT_BYTES, PATIENCE_S, ElsewhereCore
from choreo_agents.engine.elsewhere.routing import Costs
from choreo_agents.engine.elsewhere.sending import (
    Copying,
    FarEngine,
    Greeted,
    Greeting,
    JoiningMessage,
    SentAnswer,
    SentCall,
)
from choreo_agents.engine.elsewhere.serving import EngineServer

__all__ = [
    "COPIED_BYTES",
    "FRONT_BYTES",
    "PATIENCE_S",
    "Copying",
    "Costs",
    "ElsewhereCore",
    "EngineServer",
    "FarEngine",
    "Greeted",
    "Greeting",
    "JoiningMessage",
    "SentAnswer",
    "SentCall",
]
