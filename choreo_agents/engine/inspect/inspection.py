"""How messages came about: from what, in which order, and through whom."""

from __future__ import annotations

from collections.abc import Container, Sequence

from choreo_agents.engine.inspect.audit import LineageReport, trace
from choreo_agents.engine.inspect.descent import Descent, descent_of
from choreo_agents.engine.inspect.records import MessageRecord, records_of
from choreo_agents.engine.messages.message import thinker
from choreo_agents.engine.tenant import Tenant
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.decoding import FinishReason


class Inspection:
    """What lineage says of a tenant's messages: `engine.inspect`. Handles must be leased; what they come from need not.

    Every method raises `HandleError` if a handle is unknown, released, or another model's.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    def records(self, handles: Sequence[MessageHandle]) -> tuple[MessageRecord, ...]:
        """How these messages and all that they descend from were made, released ones included: parents first."""
        return records_of(self._tenant, handles)

    def ancestors(self, handle: MessageHandle) -> dict[MessageHandle, str | None]:
        """All that a message's encoding has ever attended to, with authors: nearest first, released ones included."""
        return {message.handle: message.author for message in self._tenant.find(handle).ancestors()}

    def finish_reason(self, handle: MessageHandle) -> FinishReason | None:
        """Why a message ended: `"stop"`, by itself; `"length"`, cut at `max_tokens`; None: it was not decoded.

        Of equal words in an equal place, why those ended that were decoded last.
        """
        return self._tenant.find(handle).finish_reason

    def thoughts(
        self, handle: MessageHandle, author: str | None = None, *, memo: str | None = None
    ) -> tuple[MessageHandle, ...]:
        """What was thought before a message was said: more than once, if several calls came to the same words.

        Each holds thoughts and answer as they were decoded, in the order of the calls. Empty for what was said without
        thinking. What a call has thought goes when its lease of the message does.

        Args:
            handle: The message.
            author: Whose thoughts; None: everybody's.
            memo: Of the call whose thoughts they are; None: of any.
        """
        found = self._tenant.find(handle).thoughts
        named = (each.message for each in found if memo is None or each.call == memo)
        thought = (each.handle for each in named if author is None or thinker(author) in each.authors)
        return tuple(dict.fromkeys(thought))

    def audit(self, handles: Sequence[MessageHandle]) -> LineageReport:
        """Who influenced these messages, and how: what each attended to, and whose words it or that was made of.

        Authors are those of all calls on this engine: equal words in an equal place are one message. Who they are in
        one run of one graph, `app.audit(state)` tells.
        """
        core = self._tenant.core
        with core.lock:
            return LineageReport(tuple(trace(self._tenant.find(handle), core.method.keeps_kv) for handle in handles))

    def descent(self, handles: Sequence[MessageHandle], known: Container[str] = ()) -> dict[str, Descent]:
        """From what these messages were made, and all that those were made of, by id; what is `known` is left out."""
        core = self._tenant.core
        with core.lock:
            return descent_of([self._tenant.find(handle) for handle in handles], known)
