"""How conversations look to one model: turns, instructions and thoughts, as its chat template writes them."""

from choreo_agents.models.chat.deriving import chat_format
from choreo_agents.models.chat.format import ChatFormat, Role, ThoughtsFormat, TurnFormat
from choreo_agents.models.chat.told import Kind, Said, instructions, question

__all__ = [
    "ChatFormat",
    "Kind",
    "Role",
    "Said",
    "ThoughtsFormat",
    "TurnFormat",
    "chat_format",
    "instructions",
    "question",
]
