"""Ready-made graphs: the workflows of Prompt Choreography, section 4."""

from choreo_agents.workflows.debate import DebateState, debate, final_answer

__all__ = ["DebateState", "debate", "final_answer"]
