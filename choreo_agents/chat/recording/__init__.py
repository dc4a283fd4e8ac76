"""Calls of chat models in recordings."""

from choreo_agents.chat.recording.recorded_chats import RecordedChats, remove_recording

__all__ = ["RecordedChats", "remove_recording"]
