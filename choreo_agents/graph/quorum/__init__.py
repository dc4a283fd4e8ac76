"""A synthesizer that starts before all its branches are in."""
