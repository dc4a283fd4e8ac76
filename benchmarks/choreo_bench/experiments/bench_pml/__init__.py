"""`choreo bench pml`: the first token of a prompt whose modules are encoded already, and of the same encoded whole."""
