"""What a tenant's key gives: names of messages that nobody else can give, and seals."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from choreo_agents.engine.messages.message import Lineage, Message
from choreo_agents.engine.messages.seals import Seals
from choreo_agents.kv.handle import MessageHandle, message_id
from choreo_agents.kv.store import KVKey


class Naming:
    """Of one tenant.

    Args:
        salt: The tenant's secret; without one, its names are this engine's alone.
        model: Fingerprint of the model.
        secret: The engine's.
    """

    def __init__(self, salt: str, model: str, secret: bytes) -> None:
        # What is made of the salt alone anybody can make who guesses that there is none.
        self.salt = salt or secret.hex()
        """Under which another engine gives the same names: for whoever serves the tenant elsewhere, and nobody else."""
        self._key = hmac.digest(b"choreo", self.salt.encode(), "sha256")
        self._lasting_key = hmac.digest(b"choreo", salt.encode(), "sha256")
        self._lasting: WeakKeyDictionary[Message, str] = WeakKeyDictionary()
        self._model = model
        self.salted = bool(salt)
        """Whether other processes give the same names."""
        self.tenant = hashlib.sha256(self._key).hexdigest()[:16]
        """Names the tenant; does not tell the salt."""
        self.seal = hmac.digest(self._key, b"files", "sha256")
        """Signs the tenant's files."""
        self.seals = Seals(self._key, salted=self.salted)
        """Of what is said."""

    def encoder(self, adapter: str = "", mapper: str = "") -> str:
        """Fingerprint of what makes KV: the model, with an adapter or a mapper if it has one."""
        return self._model + (f"+{adapter}" if adapter else "") + (f"~{mapper}" if mapper else "")

    def handle(self, lineage: Lineage) -> MessageHandle:
        """Of the message that a lineage makes."""
        named = self._named(self._key, lineage, [parent.handle.id for parent in lineage.parents])
        encoder = self.encoder(lineage.adapter, lineage.mapper)
        return MessageHandle(id=named, model=encoder, length=len(lineage.tokens))

    def lasting(self, lineage: Lineage) -> str:
        """What tells a lineage from others in each run of a program alike, also without a salt: seeds come of it.

        Nothing is found by it.
        """
        if self.salted:
            return self.handle(lineage).id
        for parent in lineage.parents:
            for message in parent.unknown(self._lasting.__contains__):
                self._lasting[message] = self._lastingly(message.lineage)
        return self._lastingly(lineage)

    def _lastingly(self, lineage: Lineage) -> str:
        return self._named(self._lasting_key, lineage, [self._lasting[parent] for parent in lineage.parents])

    def _named(self, key: bytes, lineage: Lineage, parents: Sequence[str]) -> str:
        encoder, placement = self.encoder(lineage.adapter, lineage.mapper), lineage.placement
        return message_id(key, encoder, lineage.tokens, parents, placement.relative())

    def key(
        self, tokens: tuple[int, ...], parents: Sequence[MessageHandle], offsets: Sequence[int], at: int, adapter: str
    ) -> KVKey:
        """What names the KV of tokens at a position after parents, whether or not there are such.

        Args:
            tokens: Its own.
            parents: What it attends to.
            offsets: Where each of them appears.
            at: The position of its first token.
            adapter: Fingerprint of the adapter that encodes it; empty: the model alone.
        """
        encoder, ids = self.encoder(adapter), [parent.id for parent in parents]
        relative = [offset - at for offset in offsets]
        named = message_id(self._key, encoder, tokens, ids, relative)
        return KVKey(named, encoder, tokens, tuple(zip(ids, relative, strict=True)), at)
