"""What goes to and fro between an engine's router and the engines that compute for it: plain values, for any wire."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Protocol

from choreo_agents import Decode, MessageHandle, Prefill, Usage
from choreo_agents.engine import PlayedCall
from choreo_agents.engine.delegation import LineageRow, Message, PlacedCall, ServedModel, row_of
from choreo_agents.sampling import SampledToken


@dataclass(frozen=True)
class Hello:
    """What a router says before it sends anything."""

    router: str
    """Names it among all that an engine serves; whoever knows it may act as this router."""
    model: str
    """Fingerprint of the model whose messages it has; empty: any."""
    version: str
    """Of this package there."""
    default: str | None = None
    """What calls that name no adapter are run with, as the router knows it (see `Loaded.key`); None: anything."""


@dataclass(frozen=True)
class HelloReply:
    """What an engine says of itself."""

    served: ServedModel
    total_tokens: int
    """That its memory has room for."""
    kv_budget_bytes: int
    held: Mapping[str, Sequence[str]]
    """What it has for this router already: ids of messages, by the tenant's salt."""


@dataclass(frozen=True)
class SentAdapter:
    """An adapter or cache mapper that a tenant's calls can name."""

    router: str
    salt: str
    name: str
    files: Mapping[str, bytes]
    """Of its folder, by name."""


@dataclass(frozen=True)
class Promised:
    """A message that nobody has encoded yet."""

    again: bool
    """Whether its words were encoded before and are lost."""
    foreign: tuple[MessageHandle, ...] = ()
    """The messages of other models whose words these are."""

    def put_on(self, message: Message, number: int) -> None:
        """Have a message be promised where it was not known; the number is that of the request that keeps it."""
        message.promise, message.again = number, self.again
        message.foreign.extend(self.foreign)


@dataclass(frozen=True)
class SentCall:
    """One message to make."""

    router: str
    sequence_no: int
    """Grows with all that the router sends: what was sent before may come after it."""
    number: int
    """Of the router's request."""
    salt: str
    """The tenant's."""
    call: Prefill | Decode
    """As tokens, placed, with its seed."""
    rows: tuple[LineageRow, ...]
    """Of what it reads and of all that this comes from, as far as the engine is not known to have it."""
    promised: Mapping[str, Promised] = field(default_factory=dict)
    """Those of them that nobody has encoded yet."""


@dataclass(frozen=True)
class Copying:
    """KV that goes from one engine to another."""

    router: str
    sequence_no: int
    salt: str
    ids: tuple[str, ...]
    rows: tuple[LineageRow, ...]
    """Of these and of all that they come from, as far as the engine they go to is not known to have it."""


@dataclass(frozen=True)
class Releasing:
    """Messages that a router needs no longer, unless it has said since that it does."""

    router: str
    sequence_no: int
    salt: str
    ids: tuple[str, ...]
    left: tuple[int, ...] = ()
    """Stamps of calls that it has left without an answer: what they have made, or will, nobody has asked for since."""


@dataclass(frozen=True)
class SentAnswer:
    """A message that was made, which the engine keeps until it is told to release it."""

    id: str
    tokens: tuple[int, ...]
    """All of it."""
    chosen: tuple[SampledToken, ...] | None
    finish_reason: Literal["stop", "length"] | None
    usage: Usage
    counted: Mapping[str, int]
    """What the engine has counted of the tenant's work since it last told."""


class EngineClient(Protocol):
    """An engine somewhere else, by what reaches it.

    Every method raises `EngineLostError` if the engine is gone, or gone and back without what it had.
    """

    name: str

    async def greet(self, greeting: Hello) -> HelloReply:
        """Be known to it. Raises `EngineMismatchError` if it cannot serve this router."""
        ...

    async def load_adapter(self, adapter: SentAdapter) -> None:
        """Let calls name an adapter. Raises `AdapterError`."""
        ...

    def run(self, sent: SentCall) -> AsyncGenerator[Sequence[SampledToken] | SentAnswer]:
        """No tokens, when the call has begun; those of the message as they come; and what was made last.

        Leaving it cancels the call.
        """
        ...

    async def raise_priority(self, router: str, number: int, priority: int) -> None:
        """Give a call under way a higher priority."""
        ...

    async def export_kv(self, copying: Copying) -> Any:
        """The KV of messages, for `take` of another engine: of those that it has it of now."""
        ...

    async def import_kv(self, copying: Copying, given: Any) -> tuple[Collection[str], int]:
        """Take in what another engine gave: the ids of messages that it now holds so, and the bytes of their KV."""
        ...

    async def release(self, releasing: Releasing) -> None:
        """The router needs messages no longer."""
        ...

    async def close_tenant(self, router: str, salt: str, sequence_no: int) -> None:
        """The router serves this tenant no longer, unless it has sent something for it since."""
        ...


def own_version() -> str:
    """Name what is installed: what is sent means the same to engines of one version only."""
    return ", ".join(f"{name} {_installed(name)}" for name in ("choreo-agents", "choreo-ray"))


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from source"


def sent(
    router: str,
    sequence_no: int,
    number: int,
    salt: str,
    placed: PlacedCall,
    seed: int | None,
    known: Collection[str],
    delivered: Sequence[int] = (),
    priority: int = 0,
) -> SentCall:
    """A call as it is sent to an engine.

    Args:
        router: Sends it.
        sequence number: Of this.
        number: Of its request.
        salt: The tenant's.
        placed: The call.
        seed: Of its sampling; None: it does not sample.
        known: The ids of what the engine has.
        delivered: Tokens that an engine which was lost had sampled: the answer starts with them.
        priority: That it has by now.
    """
    read, lineage = placed.read, placed.lineage
    place: dict[str, Any] = {
        "parents": [parent.handle for parent in lineage.parents],
        "offsets": list(lineage.placement.offsets),
        "position": lineage.placement.position,
        "timeout_s": None,
        "escape_special_tokens": False,
        "priority": priority,
    }
    call: Prefill | Decode
    if isinstance(read.call, Prefill):
        if read.call.maps:
            place |= {"offsets": None, "position": None}
        # Only another model's message matters as a source: the engine counts tokens by it, and need not have others.
        place |= {"source": placed.said.foreign, "lazy": False}
        call = replace(read.call, content=list(lineage.tokens), **place)
    else:
        sampling = read.call.sampling.model_copy(update={"seed": seed, "n": 1})
        closing = None if read.call.turn_suffix is None else list(read.turn_suffix)
        place |= {"header": list(lineage.tokens), "sampling": sampling, "turn_suffix": closing}
        played = _played(read.call.played, delivered)
        call = replace(read.call, idempotency_key=None, logits_callback=None, played=played, **place)
    rows, promised = rows_of(lineage.parents, known)
    return SentCall(router, sequence_no, number, salt, call, rows, promised)


def rows_of(
    messages: Collection[Message], known: Collection[str]
) -> tuple[tuple[LineageRow, ...], dict[str, Promised]]:
    """What an engine has to be told of messages, and which of them nobody has encoded yet."""
    lacking = lacked(messages, known)
    open_ones = [each for each in lacking if each.promise is not None]
    promised = {each.handle.id: Promised(each.again, tuple(each.foreign)) for each in open_ones}
    return tuple(map(row_of, lacking)), promised


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


def _played(played: PlayedCall | None, delivered: Sequence[int]) -> PlayedCall | None:
    """What a call says, if that is known before: at least what was delivered already."""
    if not delivered:
        return played
    if played is None:
        return PlayedCall("", tuple(delivered))
    return played if played.tokens is not None else replace(played, tokens=tuple(delivered))
