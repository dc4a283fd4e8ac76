"""`choreo train synthesizer`: an adapter and a cache mapper for whoever merges branches."""
