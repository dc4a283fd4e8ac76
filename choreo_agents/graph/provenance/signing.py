"""Plain nodes sign what they say: it is theirs, and nobody else's."""

from __future__ import annotations

import uuid
from functools import cached_property
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.types import Overwrite

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import author_of, channel_values, overwritten, run_step_of
from choreo_agents.graph.provenance.conversation import Conversation
from choreo_agents.graph.provenance.notary import notary_of
from choreo_agents.graph.provenance.notes import NOTED, SOURCE, STEP, digest_of, stripped
from choreo_agents.graph.provenance.updates import listed_messages, rewritten


def sign(output: Any, config: RunnableConfig) -> Any:
    """A plain node's output in any form that LangGraph takes, with the node's name on the messages that it adds.

    What it only hands on stays as it is: agents' messages, people's and instructions with an id, and what is signed.
    """
    return rewritten(output, {"messages": _Signature(config).put_on})


class _Signature:
    """Of one execution of one node."""

    def __init__(self, config: RunnableConfig) -> None:
        self._config = config
        self._author = author_of(config, "")

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
    def _known(self) -> dict[str | None, str]:
        """What stands in the state already, by id."""
        held = channel_values(self._config, ("messages",)).get("messages")
        found = held if isinstance(held, list) else []
        return {message.id: digest_of(message) for message in found if isinstance(message, BaseMessage)}

    def _signed(self, message: BaseMessage) -> BaseMessage:
        handed_on = message.id is not None and message.type in ("human", "system")
        claims = SOURCE in message.additional_kwargs or NOTED in message.response_metadata
        if message.type == "remove" or (handed_on and not claims):
            return message
        if claims and (self._conversation is None or self._conversation.proves(message)):
            return message
        if claims and self._known.get(message.id) == digest_of(message):
            return message  # unproven as it was
        if handed_on:
            return stripped(message)
        named = message if message.id is not None else message.model_copy(update={"id": str(uuid.uuid4())})
        step = run_step_of(self._config)
        if self._conversation is not None:
            return self._conversation.signed(named, self._author, step)
        signed = {**named.additional_kwargs, SOURCE: self._author, STEP: step}
        return named.model_copy(update={"additional_kwargs": signed})
