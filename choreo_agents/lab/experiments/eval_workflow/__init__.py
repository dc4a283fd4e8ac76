"""`choreo eval WORKFLOW`, and `choreo run WORKFLOW` on a file of items."""
