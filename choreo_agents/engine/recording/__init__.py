"""Recordings of runs: one versioned file of JSON lines, which records, replays, forks and inspections share."""
