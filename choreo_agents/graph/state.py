"""Graph state: handles as plain-JSON entries, and the same messages' text as chat messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NotRequired

from langchain_core.messages import AnyMessage
from langgraph.graph.message import add_messages
from typing_extensions import TypedDict

from choreo_agents.graph.langgraph_internals import growing
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle, base_model

_SAME = ("digest", "author", "persona", "confidential")
"""Fields that are equal in two entries of the same text by the same author."""

SENT_AT = "choreo_sent_at"
"""State key of a `Send` branch: the earliest superstep of its messages."""
OF_A_SEND = ("select", "behind")
"""Fields of an entry that hold for one `Send` branch only."""


class HandleEntry(TypedDict):
    """A message in graph state. Plain data that any checkpointer, Studio and strict msgpack can store."""

    handle: dict[str, Any]
    """`MessageHandle.plain()` of the model that decoded the message or, for input, first encoded it."""
    handles_by_model: NotRequired[dict[str, dict[str, Any]]]
    """Handles of other models for the same text, by model fingerprint: each encodes it once for all its readers."""
    author: str
    """Node that wrote it, as `team|judge` in a subgraph; LangGraph's START for input."""
    superstep: int
    """Logical time: larger than that of everything its author could have seen."""
    branch: int
    """Number of its author's `Send` branch, in sending order; for input, its index."""
    call: int
    """Number of the call among those of its node."""
    task_path: NotRequired[list[int]]
    """In a subgraph: branch numbers of the tasks around it, outermost first."""
    confidential: bool
    """Whether the message is private to its persona: a plan, a chain of thought."""
    persona: NotRequired[str]
    """Persona of its author, as `team|alice` in a subgraph. A persona treats all its messages as its own."""
    tool_node: NotRequired[str]
    """For the result of a tool that its author called: the node that produced it."""
    prompt: NotRequired[dict[str, Any] | None]
    """`plain()` handle of its author's prompt, which precedes the message in the persona's own views only."""
    prompt_text: NotRequired[str]
    """Text of the prompt, for encoding it again after a restart of the engine."""
    system_texts: NotRequired[list[str]]
    """System texts of this call only: a computed system prompt, a summary."""
    thoughts: NotRequired[dict[str, Any] | None]
    """`plain()` handle of thoughts and answer as this call decoded them; None: lost. Used in its persona's own views,
    if the model's template keeps thoughts."""
    select: NotRequired[str]
    """Mode in which `send` passed it to a branch: `shared` or `reencoded`."""
    borrowed: NotRequired[bool]
    """Whether it was made of an agent's message that came without its entry: it yields to one, here or in an outer
    graph."""
    behind: NotRequired[int]
    """With `select`: number of later supersteps with a message of its author."""
    message_id: str
    """Id of the message with its text in the `messages` channel."""
    digest: str
    """Digest of its text: an edited message is encoded again."""
    earlier: NotRequired[list[str]]
    """Ids of its handles before an edit: other messages may have attended to them."""
    edited: NotRequired[bool]
    """Whether the text is no longer its author's."""
    answered: NotRequired[bool]
    """Whether it may have attended to all earlier messages: a chat model answered it in a function, or it attended to
    such an answer."""
    unverified_author: NotRequired[dict[str, Any]]
    """Claimed `author` and `persona` of input, which no signature proves: hidden from readers from whom the claimed
    source, or input, is hidden."""
    thread: NotRequired[list[str | None]]
    """Where it was signed: name of the outermost graph (None: a stock graph), and the thread."""
    signature: NotRequired[dict[str, str]]
    """Signature of the `entry`, without which it is ignored, and one per handle id, since the reducer merges handles of
    several models."""


def channel_in(state: Any, name: str) -> Any:
    """Return the value of a channel in a graph's state of any form; None: it has none."""
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def merge_entries(left: list[HandleEntry] | None, right: list[HandleEntry] | None) -> list[HandleEntry]:
    """Merge entries, as reducer of the `handles` channel: append, and replace entries of the same message id."""
    merged: dict[str, Any] = {entry["message_id"]: entry for entry in left or []}
    for entry in right or []:
        current = merged.get(entry["message_id"])
        if current is not None and (entry.get("select") or _yields_to(entry, current)):
            # Only the handles of a branch's entry concern the other branches.
            merged[entry["message_id"]] = _with_handles(current, entry)
            continue
        result = entry if current is None else _with_handles(entry, current)
        merged[entry["message_id"]] = {name: value for name, value in result.items() if name not in OF_A_SEND}
    return list(merged.values())


def merge_updates(entries: list[HandleEntry] | None, updates: Sequence[list[HandleEntry] | None]) -> list[HandleEntry]:
    """Merge several updates, one after the other."""
    return merge_entries(entries, [entry for update in updates for entry in update or []])


def _yields_to(entry: HandleEntry, current: HandleEntry) -> bool:
    """Return whether a borrowed entry yields to the current one of the same text, unless it is its own re-encoding."""
    if not entry.get("borrowed") or current.get("digest") != entry.get("digest"):
        return False
    return not current.get("borrowed") or any(current.get(name) != entry.get(name) for name in ("superstep", "branch"))


def _with_handles(entry: HandleEntry, source: HandleEntry) -> HandleEntry:
    """Return an entry extended by other models' handles in another of the same message: models encode concurrently."""
    if any(entry.get(name) != source.get(name) for name in _SAME):
        return entry
    present, offered = _by_model(entry), _by_model(source)
    added = {model: handle for model, handle in offered.items() if model not in present}
    if not added:
        return entry
    merged = HandleEntry(**{**entry, "handles_by_model": {**(entry.get("handles_by_model") or {}), **added}})
    signature, more = entry.get("signature"), source.get("signature")
    if isinstance(signature, dict) and isinstance(more, dict):
        merged["signature"] = {**more, **signature}
    return merged


def _by_model(entry: HandleEntry) -> dict[str, dict[str, Any]]:
    """Return plain handles by fingerprint. Input is not validated yet: malformed values are passed over."""
    own, also = entry.get("handle"), entry.get("handles_by_model")
    named = {base_model(str(own["model"])): own} if isinstance(own, dict) and "model" in own else {}
    return {**(also if isinstance(also, dict) else {}), **named}


# Handles of an entry: that of its author's model, and those of other models. A handle is valid for one model: where two
# models serve a graph, or the model has changed, each encodes the text once, and the entry keeps the handle


def model_of(plain: Mapping[str, Any]) -> str:
    """Return the fingerprint of a plain handle's model."""
    return base_model(str(plain["model"]))


def handle_for(entry: Mapping[str, Any], model: str) -> MessageHandle | None:
    """Return a model's handle of an entry's message; None: it has not encoded it."""
    own = handle_in(entry["handle"])
    if own.base_model == model:
        return own
    plain = (entry.get("handles_by_model") or {}).get(model)
    return None if plain is None else handle_in(plain)


def handle_in(plain: Any) -> MessageHandle:
    """Return the handle of a plain one in graph state; raises `ValidationError` if it is none."""
    try:
        return _handle(**plain)
    except TypeError:  # no mapping, or fields that cannot be cached
        return MessageHandle.model_validate(plain)


@lru_cache(maxsize=1 << 15, typed=True)
def _handle(**plain: Any) -> MessageHandle:
    """Return a handle; cached, since every call reads the same ones."""
    return MessageHandle(**plain)


def length_for(entry: Mapping[str, Any], model: str) -> int:
    """Return a message's number of tokens for a model; before it encodes the message, that of the author's model."""
    return (handle_for(entry, model) or handle_in(entry["handle"])).length


def handles_of(entry: Mapping[str, Any]) -> Iterator[MessageHandle]:
    """Yield all handles of an entry's present text, its author's model's first."""
    for plain in (entry["handle"], *(entry.get("handles_by_model") or {}).values()):
        yield handle_in(plain)


def is_input(entry: Mapping[str, Any]) -> bool:
    """Return whether it is input."""
    return bool(entry["author"] == START_SOURCE)


def is_of_agent(entry: Mapping[str, Any]) -> bool:
    """Return whether an agent wrote it, not input or a plain node."""
    return "persona" in entry


def is_own(entry: HandleEntry, reader: str, persona: str) -> bool:
    """Return whether the reader's own persona is a message's author, or, without a signature, its claimed author."""
    author = entry.get("unverified_author") or entry
    return author["author"] == reader or author.get("persona") == persona


def with_handle(entry: HandleEntry, handle: MessageHandle) -> HandleEntry:
    """Return an entry with a model's new handle of the same text, in place of the model's earlier one."""
    before, plain = handle_for(entry, handle.base_model), handle.plain()
    lost = [] if before is None else [before.id]
    changed = HandleEntry(**{**entry, "earlier": [*entry.get("earlier", ()), *lost]}) if lost else entry.copy()
    if model_of(entry["handle"]) == handle.base_model:
        changed["handle"] = plain
    else:
        changed["handles_by_model"] = {**(entry.get("handles_by_model") or {}), handle.base_model: plain}
    return changed


def with_edited_text(entry: HandleEntry, handle: MessageHandle, digest: str) -> HandleEntry:
    """Return an entry with an edited text: earlier handles of all models are dropped."""
    earlier = [*entry.get("earlier", ()), *(old.id for old in handles_of(entry))]
    changed = HandleEntry(**{**entry, "handle": handle.plain(), "digest": digest, "earlier": earlier})
    changed.pop("handles_by_model", None)
    return changed


# The state


Handles = Annotated[list[HandleEntry], growing(merge_entries, merge_updates)]
"""Type of the `handles` channel."""


class ChoreoState(TypedDict, total=False):
    """State that agents read and write. Extend it with channels of your own."""

    handles: Handles
    messages: Annotated[list[AnyMessage], add_messages]
