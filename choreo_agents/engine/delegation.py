"""Internal names for an `Execution` of another distribution that runs an engine's calls in other processes.

`choreo-ray` imports these and no other internals; its import contract fails for any more. They are not public and
change with every version, so both must have the same version. Start with `Execution` in `choreo_agents.engine.core`,
which says what an implementer provides.
"""

from choreo_agents.engine.core import EngineCore, Execution
from choreo_agents.engine.engine import engine_over
from choreo_agents.engine.lineage import Promised
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.request_builder import PlacedCall
from choreo_agents.kv.store import KVKey
from choreo_agents.models.weightless import ServedModel
from choreo_agents.runtime.loop import ActiveRequests
from choreo_agents.runtime.request import Request
