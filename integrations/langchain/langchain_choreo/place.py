"""Where a call is made: in which thread, and for whom."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from weakref import WeakKeyDictionary

from langchain_core.runnables import RunnableConfig, ensure_config

from choreo_agents import AnswerSigner, Engine

Tenant = str | Callable[[RunnableConfig], str]
"""The salt of whom a call is for: always the same, or told by the call's config, of what a service has authenticated
and never of a `configurable` value that a client may write."""


class CallPlace:
    """Of one call. It is among the call's arguments, which caches and traces write down: it does not hold the salt.

    Args:
        config: With which it is made.
        salt: Of the tenant; empty: all is one tenant's.
    """

    def __init__(self, config: RunnableConfig, salt: str = "") -> None:
        thread = config.get("configurable", {}).get("thread_id")
        self.thread = None if thread is None else str(thread)
        """Which keeps what is encoded; None: no thread."""
        self.tenant = hashlib.sha256(f"langchain-choreo {salt}".encode()).hexdigest()[:16] if salt else ""
        """Names it, and does not tell the salt."""
        _HIDDEN[self] = salt, AnswerSigner(config)

    @classmethod
    def of(cls, config: RunnableConfig | None, tenant: Tenant | None) -> CallPlace:
        """Of a call with a config: its own, or that of what it is made in.

        Raises:
            ValueError: The tenant is nobody.
        """
        known = ensure_config(config)
        salt = tenant(known) if callable(tenant) else tenant
        if tenant is not None and (not isinstance(salt, str) or not salt):
            raise ValueError(f"tenant must name whom a call is for by a salt, a text that is not empty, not {salt!r}")
        return cls(known, salt or "")

    def engine(self, engine: Engine) -> Engine:
        """An engine, for whom the call is."""
        salt, _ = _HIDDEN[self]
        return engine.tenant(salt) if salt else engine

    @property
    def answers(self) -> AnswerSigner:
        """Signs what is answered in the run that the call is made in."""
        return _HIDDEN[self][1]

    def __repr__(self) -> str:
        return f"CallPlace({self.thread!r}, {self.tenant!r})"


_HIDDEN: WeakKeyDictionary[CallPlace, tuple[str, AnswerSigner]] = WeakKeyDictionary()
