"""Plain nodes sign what they say: it is theirs, and nobody else's."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.types import Overwrite

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import author_of, channel_values, overwritten, run_step_of
from choreo_agents.graph.message_names import with_id
from choreo_agents.graph.provenance.authorship import Authorship
from choreo_agents.graph.provenance.conversation import Conversation
from choreo_agents.graph.provenance.notary import notary_of
from choreo_agents.graph.provenance.notes import (
    CONFIDENTIAL,
    SOURCE,
    STEP,
    claim_of,
    digest_of,
    drops_thoughts,
    is_edited,
    stripped,
)
from choreo_agents.graph.provenance.updates import listed_messages, rewritten


def sign(output: Any, config: RunnableConfig, persona: str | None = None, *, confidential: bool = False) -> Any:
    """A plain node's output in any form that LangGraph takes, with the node's name on the messages that it adds.

    What it only hands on stays as it is: what stands in the state, people's and instructions with an id, what was said
    inside of it, and what others said in their own words. What an agent said in other words is the node's own, unless
    it is one of that agent's.

    Args:
        output: What it returned.
        config: Its own.
        persona: Whose node it is declared to be; None: its own.
        confidential: Whether what it adds of its own is a private context.
    """
    return rewritten(output, {"messages": _Signature(config, persona, confidential).put_on})


class _Signature:
    """Of one execution of one node."""

    def __init__(self, config: RunnableConfig, persona: str | None, confidential: bool) -> None:
        self._config = config
        self._is_confidential = confidential
        self._author = author_of(config, "")
        home = self._author.rpartition("|")[0]
        self._authorship = Authorship(self._author, f"{home}|{persona}" if home and persona else persona)

    def put_on(self, added: Any) -> Any:
        if added is None:
            return None
        is_overwrite, given = overwritten(added)
        try:
            messages = listed_messages(given)
        except (NotImplementedError, ValueError) as error:
            # Passed on unsigned it would count as input, and be shown to those from whom its node is hidden.
            raise InvalidRequestError(f"node {self._author!r} wrote to messages what is no message: {error}") from error
        signed = [self._signed(message) for message in messages]
        return Overwrite(signed) if is_overwrite else signed

    @cached_property
    def _conversation(self) -> Conversation | None:
        notary = notary_of(self._config)
        return None if notary is None else notary.conversation(self._config)

    @cached_property
    def _standing(self) -> dict[str | None, BaseMessage]:
        """What stood in the state before, by id."""
        held = channel_values(self._config, ("messages",)).get("messages")
        found = held if isinstance(held, list) else []
        return {message.id: message for message in found if isinstance(message, BaseMessage)}

    def _signed(self, message: BaseMessage) -> BaseMessage:
        standing = None if message.id is None else self._standing.get(message.id)
        if message.type == "remove":
            return message
        if standing is not None and (_hands_on(message, standing) or self._covers(standing)):
            is_same = claim_of(standing) == claim_of(message)
            return message if is_same else standing.model_copy(update={"content": message.content})
        claim, is_anothers = claim_of(message), standing is not None and claim_of(standing) is not None
        is_proven = claim is not None and (self._conversation is None or self._conversation.proves(message))
        if is_proven and (not is_edited(message) or self._covers(message)):
            return message
        if claim is not None and self._conversation is not None and self._covers(message):
            return self._conversation.sealed(with_id(message, self._config))
        if message.id is not None and message.type in ("human", "system") and not is_anothers and not is_proven:
            return stripped(message) if claim is not None else message
        return self._own(message)

    def _own(self, message: BaseMessage) -> BaseMessage:
        named, step = with_id(message, self._config), run_step_of(self._config)
        if self._conversation is not None:
            return self._conversation.signed(named, self._author, step, confidential=self._is_confidential)
        bare = stripped(named)
        signed = {**bare.additional_kwargs, SOURCE: self._author, STEP: step}
        signed |= {CONFIDENTIAL: True} if self._is_confidential else {}
        return bare.model_copy(update={"additional_kwargs": signed})

    def _covers(self, message: BaseMessage) -> bool:
        """Whether it may say in other words what somebody said: of nobody's message it may not."""
        claim = claim_of(message)
        return claim is not None and self._authorship.covers(claim.author, claim.persona)


def _hands_on(message: BaseMessage, standing: BaseMessage) -> bool:
    """Whether it is what stands there, or that without its thoughts."""
    digest = digest_of(standing)
    return digest_of(message) == digest or drops_thoughts(message, digest)
