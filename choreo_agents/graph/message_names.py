"""Ids of messages that come without one, in a run that is recorded or played again: the same in both.

LangGraph draws them at random. What was recorded may name a message by its id, and what nothing else tells apart stands
in a view in the order of ids. They are made under the recording's key: a thread that two recordings have runs of must
not get an id twice, and nobody is to find out by guessing what a message says whose id is in the file.
"""

from __future__ import annotations

import hmac
import threading
import uuid
from collections import Counter

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from choreo_agents.graph.langgraph_internals import branch_of, hidden_in, superstep_of, with_hidden
from choreo_agents.graph.nesting import author_of

_NAMES = "names"


class MessageNames:
    """Of one run. May be used from any thread.

    Args:
        run: Its number in the recording.
        key: The recording's.
    """

    def __init__(self, run: int, key: bytes) -> None:
        self._run, self._key = run, key
        self._given: Counter[str] = Counter()
        self._lock = threading.Lock()

    def name(self, message: BaseMessage, config: RunnableConfig) -> str:
        """The id of a message that a node with this config has made."""
        where = f"{self._run} {author_of(config)} {superstep_of(config)} {branch_of(config)}"
        said = repr((where, message.type, message.name, message.content, getattr(message, "tool_calls", None)))
        digest = hmac.digest(self._key, said.encode(), "sha256").hex()
        with self._lock:
            number = self._given[digest]
            self._given[digest] += 1
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{digest} {number}"))


def with_names(config: RunnableConfig | None, names: MessageNames) -> RunnableConfig:
    """The config of a run that names its messages so."""
    return with_hidden(config, _NAMES, names)


def is_named(config: RunnableConfig) -> bool:
    """Whether a run names its messages."""
    return isinstance(hidden_in(config, _NAMES), MessageNames)


def with_id(message: BaseMessage, config: RunnableConfig) -> BaseMessage:
    """A message with an id, of whatever run."""
    if message.id is not None:
        return message
    names = hidden_in(config, _NAMES)
    name = names.name(message, config) if isinstance(names, MessageNames) else str(uuid.uuid4())
    return message.model_copy(update={"id": name})
