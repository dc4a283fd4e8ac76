"""`choreo eval WORKFLOW`."""
