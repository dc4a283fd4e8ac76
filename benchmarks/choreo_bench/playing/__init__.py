"""Many items of a workflow, and what they are worth together."""
