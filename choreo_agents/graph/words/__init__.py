"""Text of a graph's messages: prompts and thoughts of agents, and the entries of messages in graph state."""
