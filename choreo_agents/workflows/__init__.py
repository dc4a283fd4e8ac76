"""Ready-made multi-agent graphs: the workflows of Prompt Choreography, sections 3 and 4."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from choreo_agents.workflows.graphs.branch_solve_merge import branch_solve_merge
    from choreo_agents.workflows.graphs.debate import DebateState, debate, final_answer
    from choreo_agents.workflows.graphs.direct import direct
    from choreo_agents.workflows.graphs.iterative_debate import Role, iterative_debate
    from choreo_agents.workflows.graphs.multi_qa import multi_qa
    from choreo_agents.workflows.graphs.prisoners_dilemma import prisoners_dilemma
    from choreo_agents.workflows.graphs.tree_of_thoughts import tree_of_thoughts

__all__ = [
    "DebateState",
    "Role",
    "branch_solve_merge",
    "debate",
    "direct",
    "final_answer",
    "iterative_debate",
    "multi_qa",
    "prisoners_dilemma",
    "tree_of_thoughts",
]

if not TYPE_CHECKING:  # a type checker would accept any name as an attribute

    def __getattr__(name: str) -> object:
        """Import a graph on first access: listing the options of commands must import neither torch nor LangGraph."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = {"DebateState": "debate", "final_answer": "debate", "Role": "iterative_debate"}.get(name, name)
        return getattr(import_module(f"{__name__}.graphs.{module}"), name)

    def __dir__() -> list[str]:
        return __all__
