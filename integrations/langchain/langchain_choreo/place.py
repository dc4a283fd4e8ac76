"""Thread and tenant of a call, from its LangChain config."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from weakref import WeakKeyDictionary

from langchain_core.runnables import RunnableConfig, ensure_config

from choreo_agents import AnswerSigner, Engine

Tenant = str | Callable[[RunnableConfig], str]
"""A tenant's salt: a fixed one, or a function of the call's config. The function must use what a service has
authenticated, and never a `configurable` value that a client may write."""


class CallPlace:
    """Thread and tenant of a call. Caches and traces serialise a call's arguments, so it must not contain the salt.

    Args:
        config: The call's config.
        salt: Salt of the tenant; empty: there is a single tenant.
    """

    def __init__(self, config: RunnableConfig, salt: str = "") -> None:
        thread = config.get("configurable", {}).get("thread_id")
        self.thread = None if thread is None else str(thread)
        """LangGraph thread, which leases the call's KV; None: no thread."""
        self.tenant = hashlib.sha256(f"langchain-choreo {salt}".encode()).hexdigest()[:16] if salt else ""
        """Digest of the salt, which identifies the tenant."""
        _HIDDEN[self] = salt, AnswerSigner(config)

    @classmethod
    def of(cls, config: RunnableConfig | None, tenant: Tenant | None) -> CallPlace:
        """Return the place of a call with a config; None: the config of the runnable that makes the call.

        Raises:
            ValueError: The salt of the tenant is no text, or empty.
        """
        full_config = ensure_config(config)
        salt = tenant(full_config) if callable(tenant) else tenant
        if tenant is not None and (not isinstance(salt, str) or not salt):
            raise ValueError(f"tenant must be a salt, a non-empty string, not {salt!r}")
        return cls(full_config, salt or "")

    def engine(self, engine: Engine) -> Engine:
        """Return an engine for the call's tenant."""
        salt, _ = _HIDDEN[self]
        return engine.tenant(salt) if salt else engine

    @property
    def answers(self) -> AnswerSigner:
        """Signer of answers in the call's run."""
        return _HIDDEN[self][1]

    def __repr__(self) -> str:
        return f"CallPlace({self.thread!r}, {self.tenant!r})"


_HIDDEN: WeakKeyDictionary[CallPlace, tuple[str, AnswerSigner]] = WeakKeyDictionary()
