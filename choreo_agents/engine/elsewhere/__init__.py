"""Engines elsewhere: one that knows all messages, and has others compute them.

front       tenants, handles, leases, memos, lineage: all that an engine knows, and no KV
elsewhere   engines with KV, each given calls with the lineage of what it does not know yet

Read `sending`, what goes to and fro, then `loop`, which has requests run, and `serving`, which runs them.
"""

from choreo_agents.engine.elsewhere.core import engine_over
from choreo_agents.engine.elsewhere.sending import FarEngine, Greeting, SentAnswer, SentCall
from choreo_agents.engine.elsewhere.serving import EngineServer

__all__ = ["EngineServer", "FarEngine", "Greeting", "SentAnswer", "SentCall", "engine_over"]
