"""Values that a router and its engines send each other: plain data, for any transport."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Protocol

from choreo_agents import Decode, Prefill, Usage
from choreo_agents.engine import PlayedCall
from choreo_agents.engine.delegation import KVKey, Message, PlacedCall, Promised, Request, ServedModel
from choreo_agents.sampling import SampledToken


@dataclass(frozen=True)
class Hello:
    """Greeting that a router sends before anything else."""

    router: str
    """Id of the router among all that an engine serves, and a secret: whoever knows it can act as this router."""
    model: str
    """Fingerprint of the model whose messages it has; empty: any model."""
    version: str
    """Version of this package at the router."""
    default: str | None = None
    """Adapter of calls that name none, as the router knows it (see `Loaded.key`); None: any."""


@dataclass(frozen=True)
class HelloReply:
    """Answer of an engine to `Hello`."""

    served: ServedModel
    total_tokens: int
    """Tokens that its KV memory holds."""
    kv_budget_bytes: int
    held: Mapping[str, Sequence[str]]
    """Ids of messages that it has for this router already, by the tenant's salt."""


@dataclass(frozen=True)
class SentAdapter:
    """An adapter or cache mapper that a tenant's calls can name."""

    router: str
    salt: str
    name: str
    files: Mapping[str, bytes]
    """Content of the adapter's files, by name."""


@dataclass(frozen=True)
class SentCall:
    """A call that makes one message."""

    router: str
    sequence_no: int
    """Grows with all that the router sends, which may arrive in another order."""
    number: int
    """Number of the router's request."""
    salt: str
    """Salt of the tenant."""
    call: Prefill | Decode
    """The call as tokens, with positions and seed."""
    rows: tuple[KVKey, ...]
    """Lineage of what it reads, all ancestors included, as far as the engine is not known to have it."""
    promised: Mapping[str, Promised] = field(default_factory=dict)
    """Those of these messages that nobody has encoded yet."""


@dataclass(frozen=True)
class Copying:
    """KV to be copied from one engine to another."""

    router: str
    sequence_no: int
    salt: str
    ids: tuple[str, ...]
    rows: tuple[KVKey, ...]
    """Lineage of these messages, all ancestors included, as far as the receiving engine is not known to have it."""


@dataclass(frozen=True)
class Releasing:
    """Messages that a router no longer needs, unless it has sent since that it does."""

    router: str
    sequence_no: int
    salt: str
    ids: tuple[str, ...]
    left: tuple[int, ...] = ()
    """Sequence numbers of calls that it has left without an answer: nobody has asked since for what they make."""


@dataclass(frozen=True)
class SentAnswer:
    """Answer to a call: the message that was made, which the engine keeps until it is told to release it."""

    id: str
    tokens: tuple[int, ...]
    """All tokens of the message."""
    chosen: tuple[SampledToken, ...] | None
    finish_reason: Literal["stop", "length"] | None
    usage: Usage
    counted: Mapping[str, int]
    """Amounts by which the engine's counters for the tenant have grown since its last answer."""


class EngineClient(Protocol):
    """Client through which a router reaches an engine.

    Every method raises `EngineLostError` if the engine is gone, or gone and back without what it had.
    """

    name: str

    async def greet(self, greeting: Hello) -> HelloReply:
        """Introduce a router. Raises `EngineMismatchError` if the engine cannot serve it."""
        ...

    async def load_adapter(self, adapter: SentAdapter) -> None:
        """Load an adapter that calls can name. Raises `AdapterError`."""
        ...

    def run(self, sent: SentCall) -> AsyncGenerator[Sequence[SampledToken] | SentAnswer]:
        """Yield no tokens when the call has begun, then its tokens as they come, and the answer last.

        Closing the generator cancels the call.
        """
        ...

    async def raise_priority(self, router: str, number: int, priority: int) -> None:
        """Raise the priority of a call under way."""
        ...

    async def export_kv(self, copying: Copying) -> Any:
        """Export the KV of messages, as far as the engine has it, for `import_kv` of another engine."""
        ...

    async def import_kv(self, copying: Copying, exported: Any) -> tuple[Collection[str], int]:
        """Import what another engine exported; return the ids of the messages that it now holds, and the bytes of their
        KV.
        """
        ...

    async def release(self, releasing: Releasing) -> None:
        """Release messages that the router no longer needs."""
        ...

    async def close_tenant(self, router: str, salt: str, sequence_no: int) -> None:
        """Close a tenant of the router, unless it has sent something for the tenant since."""
        ...


def own_version() -> str:
    """Return the versions that are installed: engines of other versions cannot read what is sent."""
    return ", ".join(f"{name} {_installed(name)}" for name in ("choreo-agents", "choreo-ray"))


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from source"


def build_call(
    router: str, sequence_no: int, request: Request, placed: PlacedCall, known_ids: Collection[str]
) -> SentCall:
    """Build the call that is sent to an engine. If a lost engine had sampled tokens of it, the answer starts with them.

    Args:
        router: Id of the router.
        sequence_no: Sequence number of the call.
        request: The request.
        placed: The call of the request.
        known_ids: Ids of the messages that the engine has.
    """
    read, lineage = placed.read, placed.lineage
    fields: dict[str, Any] = {
        "parents": [parent.handle for parent in lineage.parents],
        "offsets": list(lineage.placement.offsets),
        "position": lineage.placement.position,
        "timeout_s": None,
        "escape_special_tokens": False,
        "priority": request.priority,
    }
    call: Prefill | Decode
    if isinstance(read.call, Prefill):
        if read.call.maps:
            fields |= {"offsets": None, "position": None}
        # Only another model's message matters as a source: the engine counts tokens by it, and need not have others.
        fields |= {"source": placed.foreign, "lazy": False}
        call = replace(read.call, content=list(lineage.tokens), **fields)
    else:
        assert request.decoding is not None
        sampling = read.call.sampling.model_copy(update={"seed": request.decoding.seed, "n": 1})
        suffix = None if read.call.turn_suffix is None else list(read.turn_suffix)
        fields |= {"header": list(lineage.tokens), "sampling": sampling, "turn_suffix": suffix}
        played = _played(read.call.played, [chosen.token for chosen in request.chosen])
        call = replace(read.call, idempotency_key=None, logits_callback=None, played=played, **fields)
    rows, promised = rows_of(lineage.parents, known_ids)
    return SentCall(router, sequence_no, request.number, placed.builder.message_ids.salt, call, rows, promised)


def rows_of(messages: Collection[Message], known_ids: Collection[str]) -> tuple[tuple[KVKey, ...], dict[str, Promised]]:
    """Return the lineage of messages that an engine lacks, and which of them nobody has encoded yet."""
    missing = missing_lineage(messages, known_ids)
    unencoded = [message for message in missing if message.promise is not None]
    promised = {message.handle.id: Promised(message.again, tuple(message.foreign)) for message in unencoded}
    return tuple(message.kv_key() for message in missing), promised


def missing_lineage(messages: Collection[Message], known_ids: Collection[str]) -> list[Message]:
    """Return messages and their ancestors, except what is known: whoever knows a message knows its ancestors."""
    missing: dict[str, Message] = {}
    waiting = list(messages)
    while waiting:
        message = waiting.pop()
        if message.handle.id not in known_ids and message.handle.id not in missing:
            missing[message.handle.id] = message
            waiting.extend(message.parents)
    return list(missing.values())


def _played(played: PlayedCall | None, delivered: Sequence[int]) -> PlayedCall | None:
    """Return the answer of a call as far as it is known before: at least what was delivered already."""
    if not delivered:
        return played
    if played is None:
        return PlayedCall("", tuple(delivered))
    return played if played.tokens is not None else replace(played, tokens=tuple(delivered))
