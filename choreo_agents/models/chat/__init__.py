"""How conversations look to one model: turns, instructions and thoughts, as its chat template writes them."""

from choreo_agents.models.chat.deriving import chat_format
from choreo_agents.models.chat.format import ChatFormat, Role, ThoughtsFormat, TurnFormat

__all__ = ["ChatFormat", "Role", "ThoughtsFormat", "TurnFormat", "chat_format"]
