"""Graph state: handles as JSON-plain entries, and the words mirrored as chat messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NotRequired

from langchain_core.messages import AnyMessage
from langgraph.graph.message import add_messages
from typing_extensions import TypedDict

from choreo_agents.graph.langgraph_internals import growing
from choreo_agents.kv.handle import MessageHandle, base_model

_SAME = ("digest", "author", "persona", "confidential")
"""What two entries of one message agree in, if they have the same words of the same speaker."""

_FIELDS = len(MessageHandle.model_fields)
OF_A_SEND = ("select", "behind")
"""How one branch got an entry, which says nothing to the others."""


class HandleEntry(TypedDict):
    """One message in graph state. Plain data: any checkpointer, Studio and strict msgpack take it."""

    handle: dict[str, Any]
    """A `MessageHandle`, as its `plain()` gives it: of the model that said it or, of input, that read it first."""
    handles_by_model: NotRequired[dict[str, dict[str, Any]]]
    """What other models have made of the same words, by their fingerprints: each encodes them once for all its readers.
    """
    author: str
    """The node that said it, behind the subgraphs it stands in (`team|judge`); LangGraph's START for input text."""
    superstep: int
    """When: larger than that of everything its author could have seen."""
    branch: int
    """Which of several `Send` branches of its author, in the order in which they were sent; of input, its place."""
    call: int
    """Which of several calls that its node made."""
    task_path: NotRequired[list[int]]
    """Of one in a subgraph: which branch each of the tasks was that it stands in, outermost first."""
    confidential: bool
    """Whether the message is a private context of its own: a plan, a chain of thought."""
    persona: NotRequired[str]
    """Whose node its author is, behind the subgraphs: `team|alice`. To one persona all its messages are its own."""
    tool_node: NotRequired[str]
    """Of the result of a tool that its author has called: the node that has written it."""
    prompt: NotRequired[dict[str, Any] | None]
    """The handle of what its author was asked, as `plain()` gives it: it stands before the message in the persona's
    own views, and in nobody else's."""
    prompt_text: NotRequired[str]
    """The words of that, with which it is put back where its handle outlived its engine."""
    system_texts: NotRequired[list[str]]
    """What its author was told for this very message: its system prompt, a summary."""
    thoughts: NotRequired[dict[str, Any] | None]
    """Of what was thought out before it was said: the handle of what this very call has decoded, thoughts and answer,
    as `plain()` gives it; None where nobody has that any more. Only to its persona's own views, as its model's template
    has it."""
    select: NotRequired[str]
    """As what a `send` hands it on, where it does: `shared` or `reencoded`."""
    borrowed: NotRequired[bool]
    """Made of an agent's message that came without its entry: stands back where there is one, here or in a graph around
    this one."""
    behind: NotRequired[int]
    """Then also, in how many later supersteps its author has spoken."""
    message_id: str
    """The message in the `messages` channel that mirrors its words."""
    digest: str
    """Of these words: a message that was edited since is encoded again."""
    earlier: NotRequired[list[str]]
    """The ids of handles that it had before that: others may have attended to those."""
    edited: NotRequired[bool]
    """Whether they are no longer what its author said."""
    answered: NotRequired[bool]
    """It may have attended to all that was said before: a chat model has answered it in a function, and it stands as
    it was encoded there; or it attended to such an answer."""
    unverified_author: NotRequired[dict[str, Any]]
    """Of input that says to be somebody's (`author`, `persona`), which no signature proves: it is shown to nobody from
    whom that source, or input, is kept."""
    thread: NotRequired[list[str | None]]
    """Where it was signed: the outermost graph, by name, and the thread; a stock graph has no name."""
    signature: NotRequired[dict[str, str]]
    """By which the `entry` is known to be of its thread: without it it does not count. Each handle has one as well, by
    its id: what models have encoded side by side is put together."""


def entries_in(state: Any) -> list[HandleEntry]:
    """Return the entries that a graph's state, in any form, holds."""
    return (state.get("handles") if isinstance(state, Mapping) else getattr(state, "handles", None)) or []


def merge_entries(left: list[HandleEntry] | None, right: list[HandleEntry] | None) -> list[HandleEntry]:
    """Reducer of the `handles` channel: append, and replace the entry of a message that was said again."""
    merged: dict[str, Any] = {entry["message_id"]: entry for entry in left or []}
    for entry in right or []:
        known = merged.get(entry["message_id"])
        if known is not None and (entry.get("select") or _stands_back(entry, known)):
            # How one branch got it says nothing to the others; what its model has made of it does.
            merged[entry["message_id"]] = _with_handles(known, entry)
            continue
        kept = entry if known is None else _with_handles(entry, known)
        merged[entry["message_id"]] = {name: value for name, value in kept.items() if name not in OF_A_SEND}
    return list(merged.values())


def merge_updates(entries: list[HandleEntry] | None, updates: Sequence[list[HandleEntry] | None]) -> list[HandleEntry]:
    """The same for several updates, one after the other."""
    return merge_entries(entries, [entry for update in updates for entry in update or []])


def _stands_back(entry: HandleEntry, known: HandleEntry) -> bool:
    """Whether an entry was made of words for want of one that is there: not, if it is that one, encoded again."""
    if not entry.get("borrowed") or known.get("digest") != entry.get("digest"):
        return False
    return not known.get("borrowed") or any(known.get(name) != entry.get(name) for name in ("superstep", "branch"))


def _with_handles(entry: HandleEntry, other: HandleEntry) -> HandleEntry:
    """An entry with the encodings that another of the same message has by other models: they were made side by side."""
    if any(entry.get(name) != other.get(name) for name in _SAME):
        return entry
    mine, theirs = _by_model(entry), _by_model(other)
    added = {model: handle for model, handle in theirs.items() if model not in mine}
    if not added:
        return entry
    kept = HandleEntry(**{**entry, "handles_by_model": {**(entry.get("handles_by_model") or {}), **added}})
    own, others = entry.get("signature"), other.get("signature")
    if isinstance(own, dict) and isinstance(others, dict):
        kept["signature"] = {**others, **own}
    return kept


def _by_model(entry: HandleEntry) -> dict[str, dict[str, Any]]:
    """Plain handles by fingerprint. Nobody has looked at what comes in here: what is none of ours stays as it is."""
    own, also = entry.get("handle"), entry.get("handles_by_model")
    named = {base_model(str(own["model"])): own} if isinstance(own, dict) and "model" in own else {}
    return {**(also if isinstance(also, dict) else {}), **named}


# Whose encodings an entry names: its speaker's model's, and those that other models have made of its words. A handle is
# good for the model that made it. Where two models serve a graph, or the model has changed since, the words are encoded
# once more for each that reads them, and the entry keeps what came of it


def model_of(plain: Mapping[str, Any]) -> str:
    """The fingerprint of the model that made a plain handle."""
    return base_model(str(plain["model"]))


def handle_for(entry: Mapping[str, Any], model: str) -> MessageHandle | None:
    """What an entry's message is to a model; None: it has not encoded it."""
    own = handle_in(entry["handle"])
    if own.base_model == model:
        return own
    other = (entry.get("handles_by_model") or {}).get(model)
    return None if other is None else handle_in(other)


def handle_in(plain: Any) -> MessageHandle:
    """The handle that stands in graph state, where the same ones are read in every call.

    Raises:
        ValidationError: It is none.
    """
    try:
        if len(plain) == _FIELDS:
            return _handle(plain["id"], plain["model"], plain["length"])
    except (KeyError, TypeError):
        pass  # it is nothing like a handle
    return MessageHandle.model_validate(plain)


@lru_cache(maxsize=1 << 15, typed=True)
def _handle(name: str, model: str, length: int) -> MessageHandle:
    return MessageHandle(id=name, model=model, length=length)


def length_for(entry: Mapping[str, Any], model: str) -> int:
    """How many tokens a message takes in a view of a model's; of its speaker's, where it has not been encoded yet."""
    return (handle_for(entry, model) or handle_in(entry["handle"])).length


def handles_of(entry: Mapping[str, Any]) -> Iterator[MessageHandle]:
    """All encodings of an entry's message as it now reads, its speaker's first."""
    for plain in (entry["handle"], *(entry.get("handles_by_model") or {}).values()):
        yield handle_in(plain)


def is_of_agent(entry: Mapping[str, Any]) -> bool:
    """Whether a model has said it: what people and plain nodes write is everybody's text."""
    return "persona" in entry


def put_in(entry: HandleEntry, handle: MessageHandle) -> HandleEntry:
    """The same words, with a model's encoding of them: in place of the one that this model had before, if it had."""
    before, plain = handle_for(entry, handle.base_model), handle.plain()
    lost = [] if before is None else [before.id]
    changed = HandleEntry(**{**entry, "earlier": [*entry.get("earlier", ()), *lost]}) if lost else entry.copy()
    if model_of(entry["handle"]) == handle.base_model:
        changed["handle"] = plain
    else:
        changed["handles_by_model"] = {**(entry.get("handles_by_model") or {}), handle.base_model: plain}
    return changed


def reworded(entry: HandleEntry, handle: MessageHandle, digest: str) -> HandleEntry:
    """Other words in an entry's place: what any model has of those before is no encoding of these."""
    earlier = [*entry.get("earlier", ()), *(each.id for each in handles_of(entry))]
    changed = HandleEntry(**{**entry, "handle": handle.plain(), "digest": digest, "earlier": earlier})
    changed.pop("handles_by_model", None)
    return changed


# The state


Handles = Annotated[list[HandleEntry], growing(merge_entries, merge_updates)]
"""Entries as a graph's state has them."""


class ChoreoState(TypedDict, total=False):
    """What choreographed nodes read and write. Extend it with channels of your own."""

    handles: Handles
    messages: Annotated[list[AnyMessage], add_messages]
