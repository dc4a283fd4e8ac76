"""Functions that build the graphs of the workflows."""
