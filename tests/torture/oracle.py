"""What has to be so of every run, however it went: the same words, and nobody who has read what is not theirs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from support.visible_graphs import ECHO, Spec, key_of

from choreo_agents import Engine, MessageHandle, VisibilityRule
from choreo_agents.errors import HandleError
from choreo_agents.graph.state import handles_of
from choreo_agents.graph.visibility import mode_of
from torture.minds import Minds
from torture.rude_clients import require

Engines = Mapping[str, Engine]
"""By the fingerprint of their models."""
_PRIVATE = re.compile(r"(\w+) has \d+ red kites")
"""What a system prompt of `visible_graphs` says of its persona, and nothing else does."""
_OWN = (".system", ".thoughts")


def by_model(engines: Iterable[Engine]) -> Engines:
    """The same by the fingerprints of their models."""
    return {engine.model.adapter.fingerprint: engine for engine in engines}


def mark(number: int) -> str:
    """What a tenant's input says, and no other's."""
    return f"box {number}{number}"


def words(engines: Engines, state: Mapping[str, Any]) -> list[Any]:
    """All that was said, in tokens of each model that has read it, and as messages: thoughts, calls and answers."""
    tokens = [
        (key_of(entry), handle.base_model, tuple(engines[handle.base_model].tokens(handle)))
        for entry in state["handles"]
        for handle in _named(entry)
    ]
    return [sorted(tokens), [_told(message) for message in state["messages"]]]


def _told(message: BaseMessage) -> tuple[Any, ...]:
    calls = [(call["name"], call["args"]) for call in message.tool_calls] if isinstance(message, AIMessage) else []
    return message.type, message.name, message.content, calls


def count(state: Mapping[str, Any], counts: Counter[str]) -> None:
    """Count what a run has said."""
    entries, messages = state["handles"], state["messages"]
    counts["messages with the right words"] += len(entries)
    counts["messages with thoughts"] += sum("thoughts" in entry for entry in entries)
    counts["messages that crossed between models"] += sum(bool(entry.get("handles_by_model")) for entry in entries)
    counts["tools called"] += sum(isinstance(message, ToolMessage) for message in messages)


def require_apart(engines: Iterable[Engine], state: Mapping[str, Any], counts: Counter[str]) -> None:
    """The tenant of these engines knows no handle of another's state."""
    handles = [handle for entry in state["handles"] for handle in _named(entry)]
    for engine in engines:
        for handle in handles:
            try:
                engine.tokens(handle)
            except HandleError:
                counts["handles refused to others"] += 1
            else:
                raise AssertionError(f"a tenant reads the other's {handle}")


def require_own(
    number: int, spec: Spec, minds: Minds, engines: Engines, state: Mapping[str, Any], counts: Counter[str]
) -> None:
    """No view of a run holds another tenant's words, another's system prompt or thoughts, or words of whom its reader
    is not shown."""
    readers, rules = {speaker.name: speaker.persona for speaker in spec.speakers}, minds.rules(spec)
    for entry in state["handles"]:
        for handle in _named(entry):
            engine = engines[handle.base_model]
            records = {record.handle: record for record in engine.inspect.records([handle])}
            texts = {read: engine.model.decode(list(record.tokens)) for read, record in records.items()}
            for text in texts.values():
                require(mark(1 - number) not in text, f"tenant {number} has read the other's {text!r}")
            counts["texts read by their own tenant"] += len(texts)
            if entry["author"] not in readers or handle.base_model != _speaker(entry):
                continue
            [lineage] = engine.inspect.audit([handle]).messages
            authors = {ancestor.handle: ancestor.authors for ancestor in lineage.ancestors}
            for read in records[handle].parents:
                _require_shown(entry["author"], texts[read], authors.get(read, frozenset()), readers, rules)
                counts["messages read by whom they are shown to"] += 1


def _require_shown(
    reader: str,
    text: str,
    authors: frozenset[str],
    personas: Mapping[str, str],
    rules: Mapping[tuple[str, str], VisibilityRule],
) -> None:
    """Equal words in an equal place are one message of several authors: one of them must be shown."""
    told = {persona for persona in _PRIVATE.findall(text) if persona != personas[reader]}
    require(not told, f"{reader!r} has read the system prompt of {told}: {text!r}")
    shown = not authors or any(_shows(reader, author, personas, rules) for author in authors)
    require(shown, f"{reader!r} has read {text!r} of {sorted(authors)}")


def _shows(
    reader: str, author: str, personas: Mapping[str, str], rules: Mapping[tuple[str, str], VisibilityRule]
) -> bool:
    for own in _OWN:
        if author.endswith(own):
            name = author.removesuffix(own)
            return personas.get(name, name) == personas[reader]
    is_said = author in personas or author == ECHO or author.startswith("tools ")
    if not is_said or personas.get(author) == personas[reader]:
        return True
    rule = rules.get((author, reader))
    return rule is not None and mode_of(rule.mode).shows


def require_foreseen(app: Any, state: Mapping[str, Any], counts: Counter[str]) -> None:
    """All that has reached anybody was said beforehand to be able to."""
    known, found = (
        {(each.context, each.reader, each.channel) for each in report.findings}
        for report in (app.audit(), app.audit(state))
    )
    require(found <= known, f"reached, and not foreseen: {sorted(found - known)}")
    counts["contexts that have reached a reader, all foreseen"] += len(found)


def _named(entry: Mapping[str, Any]) -> Iterator[MessageHandle]:
    """All handles of an entry: of every model, and of its thoughts."""
    yield from handles_of(entry)
    if entry.get("thoughts"):
        yield MessageHandle.model_validate(entry["thoughts"])


def _speaker(entry: Mapping[str, Any]) -> str:
    return MessageHandle.model_validate(entry["handle"]).base_model
