"""`choreo train distill WORKFLOW`: an adapter that reads a workflow's caches."""
