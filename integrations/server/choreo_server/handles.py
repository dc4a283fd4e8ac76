"""Handles as text for clients, sealed so that a tenant can only send back handles that it was given."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

from choreo_agents import Engine, MessageHandle
from choreo_agents.errors import UnknownHandleError

_KIND = "choreo-server handle"


def seal_handle(engine: Engine, handle: MessageHandle) -> str:
    """Encode and seal a handle as URL-safe text.

    Args:
        engine: The tenant's engine, whose key seals it.
        handle: Handle of a message.
    """
    payload = urlsafe_b64encode(handle.model_dump_json().encode()).decode().rstrip("=")
    return f"{payload}.{engine.lineage.seals.seal(_KIND, payload)}"


def unseal_handle(engine: Engine, word: str) -> MessageHandle:
    """Verify and decode a handle; whether its message still exists is checked when it is read.

    Raises:
        UnknownHandleError: The handle was not given to this tenant.
    """
    payload, _, seal = word.partition(".")
    if not engine.lineage.seals.holds(seal, _KIND, payload):
        raise UnknownHandleError("its signature is not this tenant's")
    return MessageHandle.model_validate_json(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
