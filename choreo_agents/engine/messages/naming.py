"""What a tenant's salt gives: names of messages that nobody else can give, and a seal."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from choreo_agents.engine.messages.message import Lineage
from choreo_agents.kv.archive import KVKey
from choreo_agents.kv.handle import MessageHandle, message_id


class Naming:
    """Of one tenant.

    Args:
        salt: The tenant's secret.
        model: Fingerprint of the model.
    """

    def __init__(self, salt: str, model: str) -> None:
        self._key = hmac.new(b"choreo", salt.encode(), hashlib.sha256).digest()
        self._model = model
        self.salted = bool(salt)
        """Whether there is a secret, so that seals hold in other processes, too."""
        self.tenant = hashlib.sha256(self._key).hexdigest()[:16]
        """Names the tenant; does not tell the salt."""
        self.seal = hmac.new(self._key, b"files", hashlib.sha256).digest()
        """Signs the tenant's files."""

    def encoder(self, adapter: str = "", mapper: str = "") -> str:
        """Fingerprint of what makes KV: the model, with an adapter or a mapper if it has one."""
        return self._model + (f"+{adapter}" if adapter else "") + (f"~{mapper}" if mapper else "")

    def handle(self, lineage: Lineage) -> MessageHandle:
        """Of the message that a lineage makes."""
        encoder, placement = self.encoder(lineage.adapter, lineage.mapper), lineage.placement
        parents = [parent.handle.id for parent in lineage.parents]
        named = message_id(self._key, encoder, lineage.tokens, parents, placement.relative(), placement.seen_since())
        return MessageHandle(id=named, model=encoder, length=len(lineage.tokens))

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
