"""Names that last from run to run."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from choreo_agents.engine.messages.message import Lineage, Message, MessageIds, Placement, Usage


class Counting(WeakKeyDictionary[Message, str]):
    """Counts how often it is asked for a message."""

    asked = 0

    def __contains__(self, key: Any) -> bool:
        self.asked += 1
        return super().__contains__(key)


def test_a_conversation_in_which_all_see_all_is_looked_at_a_few_times_for_each_parent() -> None:
    """The engine's lock is held meanwhile: the whole of a conversation may have to be named for one call."""
    message_ids, said = MessageIds("", "model", b"secret"), list[Message]()
    for number in range(60):
        lineage = Lineage((number,), tuple(said), Placement(tuple(range(number)), number), message_ids.tenant)
        said.append(Message(message_ids.handle(lineage), lineage, None, None, Usage(0, 0, None, 0.0)))
    for seen in (said, said[-1:], said[::-1]):
        message_ids._lasting = counting = Counting()
        assert message_ids.lasting(
            Lineage((60,), tuple(seen), Placement(tuple(range(len(seen))), 60), message_ids.tenant)
        )
        assert counting.asked <= 4 * (60 * 60 // 2)
