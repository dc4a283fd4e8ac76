"""Which decode answers which call that may be made again."""

from __future__ import annotations

from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.scope import Scope


class Memos:
    """Of one table. A message knows its own, too. Used under the engine's lock only."""

    def __init__(self) -> None:
        self._answers: dict[str, Message] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def remember(self, memo: str, message: Message, scope: Scope | None) -> None:
        """Remember a call's answer, its last, while that is leased; where its scope is a thread's, until that ends."""
        if memo in self._answers:
            del self._answers[memo].memos[memo]
        self._answers[memo] = message
        message.memos[memo] = scope

    def recall(self, memo: str) -> Message | None:
        """The answer to a call that was made before."""
        return self._answers.get(memo)

    def forget(self, message: Message) -> None:
        """It answers no call any more."""
        for memo in message.memos:
            self._answers.pop(memo, None)
        message.memos.clear()

    def forget_of(self, message: Message, scope: Scope) -> None:
        """It answers no call of a thread any more."""
        for memo in message.forget(scope):
            del self._answers[memo]

    def put_back(self, message: Message) -> None:
        """It answers what it did before, as it says."""
        for memo in [memo for memo, known in self._answers.items() if known is message and memo not in message.memos]:
            del self._answers[memo]

    def check(self) -> None:
        """Assert that messages know what they answer, and are leased."""
        for memo, message in self._answers.items():
            assert message.leases > 0 and memo in message.memos
