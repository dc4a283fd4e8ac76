"""`choreo eval dilemma`: what leaks in the prisoner's dilemma (table 3 and figure 8 of Prompt Choreography)."""
