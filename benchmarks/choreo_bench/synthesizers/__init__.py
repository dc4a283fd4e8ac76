"""What a synthesizer learns from, drawn from the embedded language."""
