"""Recordings of runs: one versioned file of JSON lines that recording, replay, fork and inspection share."""
