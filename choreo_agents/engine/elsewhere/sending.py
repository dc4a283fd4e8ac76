"""What goes between an engine's front and the engines that compute for it: plain values, which any wire can carry."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from choreo_agents.engine.calls import Decode, Prefill
from choreo_agents.engine.lineage.exchange import row_of
from choreo_agents.engine.lineage.rows import LineageRow
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.usage import Usage
from choreo_agents.engine.request_builder import PlacedCall
from choreo_agents.runtime.decoding import FinishReason
from choreo_agents.sampling import Chosen


@dataclass(frozen=True)
class Greeting:
    """What an engine has to know of the front before it serves it."""

    secret: bytes
    """From which tenants without a salt have their names."""
    model: str
    """Fingerprint of the model."""


@dataclass(frozen=True)
class SentCall:
    """One message to make."""

    number: int
    """Of the front's request."""
    salt: str
    """The tenant's."""
    call: Prefill | Decode
    """As tokens, placed, with its seed."""
    rows: tuple[LineageRow, ...]
    """Of what it reads and of all that this comes from, as far as the engine is not known to have it."""
    promised: frozenset[str] = frozenset()
    """Those of them that nobody has encoded yet."""


@dataclass(frozen=True)
class SentAnswer:
    """A message that was made, which the engine keeps until it is told to release it."""

    id: str
    tokens: tuple[int, ...]
    """All of it."""
    chosen: tuple[Chosen, ...] | None
    finish_reason: FinishReason | None
    usage: Usage
    joined: tuple[tuple[str, int, int], ...]
    """What came into its view: ids, offsets, and how many of its own tokens were encoded before."""
    counted: Mapping[str, int]
    """What the engine has counted of the tenant's work since it last told."""


class FarEngine(Protocol):
    """An engine somewhere else, by what reaches it."""

    name: str

    async def greet(self, greeting: Greeting) -> int:
        """Be known to it; how many tokens its memory holds. Raises `EngineMismatchError` if it cannot serve."""
        ...

    def run(self, sent: SentCall) -> AsyncGenerator[Chosen | SentAnswer]:
        """Every token of the message as it comes, and what was made last. Leaving it cancels the call."""
        ...

    async def hurry(self, number: int, priority: int) -> None:
        """Give a call under way a higher priority."""
        ...

    async def release(self, salt: str, ids: Collection[str]) -> None:
        """The front needs these messages no longer."""
        ...


def sent(number: int, salt: str, placed: PlacedCall, seed: int | None, known: Collection[str]) -> SentCall:
    """A call as it is sent to an engine.

    Args:
        number: Of its request.
        salt: The tenant's.
        placed: The call.
        seed: Of its sampling; None: it does not sample.
        known: The ids of what the engine has.
    """
    read, lineage = placed.read, placed.lineage
    place = {
        "parents": [parent.handle for parent in lineage.parents],
        "offsets": list(lineage.placement.offsets),
        "new_offset": lineage.placement.new_offset,
        "timeout_s": None,
        "words": False,
    }
    call: Prefill | Decode
    if isinstance(read.call, Prefill):
        if read.call.maps:
            place |= {"offsets": None, "new_offset": None}
        call = replace(read.call, content=list(lineage.tokens), source=None, lazy=False, **place)
    else:
        sampling = read.call.sampling.model_copy(update={"seed": seed, "n": 1})
        closing = None if read.call.closing is None else list(read.closing)
        call = replace(
            read.call,
            header=list(lineage.tokens),
            sampling=sampling,
            closing=closing,
            memo=None,
            watch=None,
            joining=None,
            **place,
        )
    lacking = lacked(lineage.parents, known)
    promised = frozenset(each.handle.id for each in lacking if each.promise is not None)
    return SentCall(number, salt, call, tuple(map(row_of, lacking)), promised)


def lacked(messages: Collection[Message], known: Collection[str]) -> list[Message]:
    """Messages and all that they come from, less what is known: with what that comes from, it is."""
    found: dict[str, Message] = {}
    waiting = list(messages)
    while waiting:
        message = waiting.pop()
        if message.handle.id not in known and message.handle.id not in found:
            found[message.handle.id] = message
            waiting.extend(message.parents)
    return list(found.values())
