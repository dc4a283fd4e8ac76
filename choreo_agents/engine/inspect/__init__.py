"""Reading back how messages came about."""

from choreo_agents.engine.inspect.audit import Ancestor, LineageReport, MessageLineage
from choreo_agents.engine.inspect.inspection import Inspection
from choreo_agents.engine.inspect.records import MessageRecord

__all__ = ["Ancestor", "Inspection", "LineageReport", "MessageLineage", "MessageRecord"]
