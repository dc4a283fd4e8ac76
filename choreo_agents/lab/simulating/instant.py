"""An engine that answers at once: what is left of a call's time is the front's."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

from choreo_agents.engine.calls import Decode
from choreo_agents.engine.elsewhere.sending import (
    Copying,
    Greeted,
    Greeting,
    JoiningMessage,
    Releasing,
    SentAdapter,
    SentAnswer,
    SentCall,
    own_version,
)
from choreo_agents.engine.messages.usage import Usage
from choreo_agents.models import LoadedModel
from choreo_agents.models.weightless import served_model
from choreo_agents.sampling import Chosen

_ROOM = 1 << 30


class InstantEngine:
    """Says what it is forced to, and computes nothing (see `FarEngine`).

    Args:
        name: Its own.
        model: That it stands for.
    """

    def __init__(self, name: str, model: LoadedModel) -> None:
        self.name, self._served = name, served_model(model)
        self.asked_s: list[float] = []
        """When calls came, as `time.perf_counter` counts."""

    async def greet(self, greeting: Greeting) -> Greeted:
        """See `FarEngine`."""
        assert greeting.version == own_version()
        return Greeted(self._served, _ROOM, _ROOM, _ROOM, "full", {})

    async def load_adapter(self, adapter: SentAdapter) -> None:
        """See `FarEngine`."""

    async def run(self, sent: SentCall) -> AsyncGenerator[Sequence[Chosen] | SentAnswer]:
        """See `FarEngine`."""
        self.asked_s.append(time.perf_counter())
        yield ()
        call, said = sent.call, list[Chosen]()
        given: Any = call.header if isinstance(call, Decode) else call.content
        if isinstance(call, Decode):
            for token in call.sampling.forced or ():
                said.append(Chosen(token))
                yield (said[-1],)
        tokens = (*given, *(each.token for each in said))
        usage = Usage(len(tokens), 0, None, 0.0)
        chosen = tuple(said) if isinstance(call, Decode) else None
        yield SentAnswer(f"{sent.number:032x}", tokens, chosen, "length", usage, (), {})

    async def hurry(self, front: str, number: int, priority: int) -> None:
        """See `FarEngine`."""

    async def join(self, joining: JoiningMessage) -> None:
        """See `FarEngine`."""

    async def give(self, copying: Copying) -> Any:
        """See `FarEngine`."""

    async def take(self, copying: Copying, given: Any) -> tuple[Collection[str], int]:
        """See `FarEngine`."""
        return copying.ids, 0

    async def release(self, releasing: Releasing) -> None:
        """See `FarEngine`."""

    async def close_tenant(self, front: str, salt: str, stamp: int) -> None:
        """See `FarEngine`."""
