"""Handles as programs elsewhere keep them: sealed, so that what comes back is what the tenant was given."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

from choreo_agents import Engine, MessageHandle
from choreo_agents.errors import UnknownHandleError

_KIND = "choreo-server handle"


def sealed(engine: Engine, handle: MessageHandle) -> str:
    """A handle as one word.

    Args:
        engine: The tenant's, under whose key it is sealed.
        handle: Of a message.
    """
    said = urlsafe_b64encode(handle.model_dump_json().encode()).decode().rstrip("=")
    return f"{said}.{engine.lineage.seals.seal(_KIND, said)}"


def unsealed(engine: Engine, word: str) -> MessageHandle:
    """The handle that a tenant was given; whether its message is still there, its reader finds out.

    Raises:
        UnknownHandleError: This tenant was not.
    """
    said, _, seal = word.partition(".")
    if not engine.lineage.seals.holds(seal, _KIND, said):
        raise UnknownHandleError("no seal of this tenant's holds")
    return MessageHandle.model_validate_json(urlsafe_b64decode(said + "=" * (-len(said) % 4)))
