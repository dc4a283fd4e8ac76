"""What a call says of the message that it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from choreo_agents.engine.messages.message import Message
from choreo_agents.kv.handle import MessageHandle


@dataclass(frozen=True)
class Label:
    """What one call says about the message that it asks for."""

    author: str | None
    confidential: bool
    source: Message | None
    foreign: MessageHandle | None = None
    """In place of a source, the message of another model whose words these are."""
    is_thought: bool = False
    """Whether the call thinks: what it decodes is nobody's answer."""

    def origin(self, label: str) -> str:
        """See `Message.origin`; `label`: what the request is called."""
        return label if self.source is None else self.source.origin

    def put_on(self, message: Message) -> None:
        """Add it to what others said about the same message."""
        if self.author is not None:
            message.authors.add(self.author)
        message.marked = message.marked or self.confidential
        message.is_thought = message.is_thought or self.is_thought
        if self.source is not None and self.source is not message and self.source not in message.sources:
            # Nobody may lease it, and every run find it again: sources that are forgotten must not add up.
            kept = [each for each in message.sources if not each.forgotten]
            message.sources = [*kept, self.source]
        if self.foreign is not None and self.foreign not in message.foreign:
            message.foreign.append(self.foreign)
