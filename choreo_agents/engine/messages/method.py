"""Three ways to serve the same calls: from the cache, or from re-encoded text with or without a prefix cache.

    choreo      a decode attends to its parents' own encodings, each shown where the view puts it
    baseline    a decode re-encodes its parents' text, less the longest prefix already encoded
    naive       a decode re-encodes all of it

The last two are the twins of Prompt Choreography, section 3.1: prefill only stores text, and offsets are ignored.
"""

from __future__ import annotations

from typing import Protocol

from choreo_agents.engine.messages.message import Lineage
from choreo_agents.runtime.request import Encoding
from choreo_agents.runtime.under_way import Reclaimer


class Method(Reclaimer, Protocol):
    """Decides what a call encodes and reuses."""

    keeps_kv: bool
    """Whether prefill encodes and messages own KV; otherwise they are text."""

    def encoding(self, lineage: Lineage) -> Encoding: ...

    def reach(self, lineage: Lineage, added: int) -> int:
        """The first position that a call does not touch when it adds `added` tokens."""
        ...

    def room(self, lineage: Lineage, added: int) -> int:
        """Tokens of KV that must be there at once for it: what it reads, and at most what it writes."""
        ...

    def drop_tenant(self, tenant: str) -> None:
        """Give up what is cached for a tenant."""
        ...

    def check(self) -> None: ...
