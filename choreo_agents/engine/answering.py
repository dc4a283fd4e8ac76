"""Answers of models that think, as they are encoded for their readers.

decoded    header of thoughts | thoughts . . | close | answer . . | end       confidential, its speaker's
encoded    header of an answer                       | answer . . | end       what the call returns
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeGuard

from choreo_agents.engine.calls import Decode, Prefill, Thinking
from choreo_agents.engine.decoding.thoughts import thoughts_in
from choreo_agents.engine.messages.message import Message, Thought, thinker
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.messages.usage import Usage
from choreo_agents.engine.tenant import Tenant
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel


def thinks(call: Prefill | Decode) -> TypeGuard[Decode]:
    """Whether a call thinks before it answers."""
    return isinstance(call, Decode) and call.thinking is not None


def thought_out(call: Decode) -> Decode:
    """The call that decodes thoughts and answer: nobody is given what it makes."""
    return replace(call, author=None if call.author is None else thinker(call.author))


@contextmanager
def views_kept(tenant: Tenant, thoughts: Sequence[MessageHandle]) -> Iterator[None]:
    """Lease what messages have seen while the block lasts: answers are to see it as well.

    Whoever made the calls may have released it, or a late parent's branch, while they were under way.
    """
    core = tenant.core
    with core.lock:
        views = [parent for thought in thoughts for parent in tenant.find(thought).parents]
        for message in views:
            core.table.lease(message, None)
    try:
        yield
    finally:
        with core.lock:
            # Who closes a tenancy, or releases what is not its own to release, has dropped them.
            for message in views:
                if message.leases:
                    core.table.release(message, None)


def answer_of(tenant: Tenant, call: Decode, thought: MessageHandle) -> Prefill:
    """The answer alone, encoded for its readers in the place that it was thought out in.

    Args:
        tenant: Whose messages they are.
        call: Which has thinking.
        thought: What was decoded for it.
    """
    assert call.thinking is not None
    model, message = tenant.core.model, tenant.find(thought)
    start = message.native_offset
    spoken = message.tokens[message.header + _answer_at(model, call.thinking, message) :]
    return Prefill(
        [*model.encode(call.thinking.answer), *spoken],
        [parent.handle for parent in message.parents],
        [start + offset for offset in message.relative_offsets],
        start,
        author=call.author,
        role="assistant",
        confidential=call.confidential,
        adapter=call.adapter,
        priority=call.priority,
        timeout_s=call.timeout_s,
    )


def join(
    tenant: Tenant, call: Decode, thought: MessageHandle, answer: MessageHandle, scope: Scope | None
) -> MessageHandle:
    """Say of an answer what it was decoded with, and give it the lease of its thoughts, which was taken in a scope."""
    assert call.thinking is not None
    core = tenant.core
    with core.lock:
        message, source = tenant.find(answer), tenant.find(thought)
        message.finish_reason = source.finish_reason
        if message.chosen is None and source.chosen is not None:
            message.header = len(core.model.encode(call.thinking.answer))
            message.chosen = source.chosen[_answer_at(core.model, call.thinking, source) :]
            message.usage = _both(source.usage, message.usage)
        core.table.keep(message, Thought(source, call.memo, scope), scope)
        if source is message:
            # Nothing was thought: it is one message, which is nobody's thoughts.
            message.is_thought = False
            if call.author is not None:
                message.authors -= {thinker(call.author)}
                message.author = call.author
    return answer


def _answer_at(model: LoadedModel, thinking: Thinking, message: Message) -> int:
    """Where among the sampled tokens of thoughts and answer the answer starts."""
    return thoughts_in(model, thinking, [each.token for each in message.chosen or ()])


def _both(thought: Usage, encoded: Usage) -> Usage:
    """What thinking and answering have cost, and encoding the answer for its readers."""
    return replace(
        thought,
        tokens_encoded=thought.tokens_encoded + encoded.tokens_encoded,
        duration_s=thought.duration_s + encoded.duration_s,
        tokens_recomputed=thought.tokens_recomputed + encoded.tokens_recomputed,
        tokens_beyond=thought.tokens_beyond + encoded.tokens_beyond,
        tokens_of_other_models=thought.tokens_of_other_models + encoded.tokens_of_other_models,
    )
