"""`choreo eval pml`: questions about documents that are modules of a schema, and the same as ordinary prompts."""
