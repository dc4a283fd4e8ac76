"""Ready-made graphs: the workflows of Prompt Choreography, sections 3 and 4."""

from choreo_agents.workflows.branch_solve_merge import branch_solve_merge
from choreo_agents.workflows.debate import DebateState, debate, final_answer
from choreo_agents.workflows.direct import direct
from choreo_agents.workflows.iterative_debate import Role, iterative_debate
from choreo_agents.workflows.multi_qa import multi_qa
from choreo_agents.workflows.prisoners_dilemma import prisoners_dilemma
from choreo_agents.workflows.tree_of_thoughts import tree_of_thoughts

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
