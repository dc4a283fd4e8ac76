"""`choreo eval tuned`: tables 1 to 4 of Prompt Choreography, before and after distillation."""
