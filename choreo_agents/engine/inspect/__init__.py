"""Reading back how messages came about."""

from choreo_agents.engine.inspect.audit import Ancestor, LineageReport, MessageLineage
from choreo_agents.engine.inspect.descent import Descent
from choreo_agents.engine.inspect.inspection import Inspection
from choreo_agents.engine.inspect.records import MessageRecord

__all__ = ["Ancestor", "Descent", "Inspection", "LineageReport", "MessageLineage", "MessageRecord"]
