"""LangGraph graphs for agents that share KV: edges declare which node sees which, and audits check it."""

from langgraph.graph import END, START
from langgraph.types import Command, Send

from choreo_agents.graph.agent import Agent, Synthesizer, Worker
from choreo_agents.graph.answers import AnswerSigner
from choreo_agents.graph.audit.chart import Policy
from choreo_agents.graph.audit.report import AuditReport
from choreo_agents.graph.choreo_graph import ChoreoGraph
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph
from choreo_agents.graph.sending import send
from choreo_agents.graph.state import ChoreoState, HandleEntry
from choreo_agents.graph.view.call_id import RunOptions
from choreo_agents.graph.view.view import HistoryLimit
from choreo_agents.graph.visibility import VisibilityMode, VisibilityRule
from choreo_agents.synthesis.placing import Strategy

__all__ = [
    "END",
    "START",
    "Agent",
    "AnswerSigner",
    "AuditReport",
    "ChoreoGraph",
    "ChoreoState",
    "Command",
    "CompiledChoreoGraph",
    "HandleEntry",
    "HistoryLimit",
    "Policy",
    "RunOptions",
    "Send",
    "Strategy",
    "Synthesizer",
    "VisibilityMode",
    "VisibilityRule",
    "Worker",
    "send",
]
