"""Who can be influenced by whom: before a run from the graph alone, after it from lineage."""

from choreo_agents.graph.audit.chart import Chart
from choreo_agents.graph.audit.guard import Guard
from choreo_agents.graph.audit.labels import Declared, Labels, OwnTexts
from choreo_agents.graph.audit.observed import audit_entries
from choreo_agents.graph.audit.policy import Policy
from choreo_agents.graph.audit.report import AuditReport, Blocked, Finding, Hop, PrivateContext
from choreo_agents.graph.audit.static import audit_chart, audit_kept, kept

__all__ = [
    "AuditReport",
    "Blocked",
    "Chart",
    "Declared",
    "Finding",
    "Guard",
    "Hop",
    "Labels",
    "OwnTexts",
    "Policy",
    "PrivateContext",
    "audit_chart",
    "audit_entries",
    "audit_kept",
    "kept",
]
