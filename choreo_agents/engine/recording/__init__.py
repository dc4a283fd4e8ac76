"""Recordings of runs: one versioned file of JSON lines, which records, replays, forks and inspections share."""

from choreo_agents.engine.recording.digests import Digests
from choreo_agents.engine.recording.format import (
    FORMAT,
    Outcome,
    RecordedCall,
    RecordedMemory,
    RecordedMessage,
    RecordedNode,
    RecordedStep,
    RecordingEnded,
    RecordingHeader,
    RunEnded,
    RunStarted,
)
from choreo_agents.engine.recording.reading import Recording, key_of, read_recording
from choreo_agents.engine.recording.recorder import Recorder, Recordings, key_path

__all__ = [
    "FORMAT",
    "Digests",
    "Outcome",
    "RecordedCall",
    "RecordedMemory",
    "RecordedMessage",
    "RecordedNode",
    "RecordedStep",
    "Recorder",
    "Recording",
    "RecordingEnded",
    "RecordingHeader",
    "Recordings",
    "RunEnded",
    "RunStarted",
    "key_of",
    "key_path",
    "read_recording",
]
