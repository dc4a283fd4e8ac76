"""`choreo pml memory`: what a cached token takes in each memory (Prompt Cache, table 2)."""
