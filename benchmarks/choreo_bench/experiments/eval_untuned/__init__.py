"""`choreo eval untuned`: tables 1, 2 and 4 of Prompt Choreography."""
