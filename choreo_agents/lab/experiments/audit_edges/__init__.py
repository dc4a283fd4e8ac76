"""`choreo audit --measure`: what each shared edge of a graph saves and changes."""
