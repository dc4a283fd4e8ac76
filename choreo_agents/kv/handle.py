"""Message handles: small values that name an encoded message, and stand for it in graph state."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class MessageHandle(BaseModel):
    """Name of one message in an engine's KV cache. JSON-plain, frozen, equal by value.

    The id is content-addressed (see `message_id`): the same tokens encoded with the same parents at the same relative
    places by the same model have the same id.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[0-9a-f]{32}$")
    model: str
    """Fingerprint of the model that encoded it, followed by `+` and an adapter's, or `~` and a cache mapper's."""
    length: int = Field(ge=1)
    """Number of its tokens."""

    @property
    def base_model(self) -> str:
        """Fingerprint of the model alone."""
        return base_model(self.model)

    def plain(self) -> dict[str, Any]:
        """Return the handle as a JSON-plain dict, as it is kept in graph state."""
        return self.model_dump()


def base_model(encoder: str) -> str:
    """Strip the adapter's or mapper's fingerprint from that of an encoder."""
    return encoder.partition("+")[0].partition("~")[0]


def message_id(
    salt: bytes,
    model: str,
    tokens: Sequence[int],
    parents: Sequence[str],
    relative_offsets: Sequence[int],
) -> str:
    """Return the id of a message: an HMAC over everything that its encoding depends on.

    Args:
        salt: The tenant's key; another salt never yields the same id.
        model: Fingerprint of model and adapter.
        tokens: The message's own tokens.
        parents: Ids of the messages it attends to, in order.
        relative_offsets: Each parent's offset minus the message's own: only relative positions matter.
    """
    code = hmac.new(salt, digestmod=hashlib.sha256)
    parts = [model, ",".join(map(str, tokens)), ",".join(parents), ",".join(map(str, relative_offsets))]
    for part in parts:
        code.update(f"{len(part)}:{part};".encode())
    return code.hexdigest()[:32]
