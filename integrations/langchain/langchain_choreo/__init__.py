"""A LangChain chat model on choreo-agents."""

from langchain_choreo.chat_model import ChatChoreo

__all__ = ["ChatChoreo"]
