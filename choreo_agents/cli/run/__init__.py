"""`choreo run`: one instance of a workflow, live."""
