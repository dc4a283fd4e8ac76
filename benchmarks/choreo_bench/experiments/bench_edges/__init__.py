"""`choreo bench edges`: what each shared edge of a graph saves and changes."""
