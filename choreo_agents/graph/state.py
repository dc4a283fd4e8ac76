"""Graph state: handles as JSON-plain entries, and the words mirrored as chat messages."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from langchain_core.messages import AnyMessage
from langgraph.graph.message import add_messages
from typing_extensions import TypedDict


class HandleEntry(TypedDict):
    """One message in graph state. Plain data: any checkpointer, Studio and strict msgpack take it."""

    handle: dict[str, Any]
    """A `MessageHandle`, as its `plain()` gives it."""
    author: str
    """The node that said it, behind the subgraphs it stands in (`team|judge`); LangGraph's START for input text."""
    superstep: int
    """When: larger than that of everything its author could have seen."""
    branch: int
    """Which of several `Send` branches of its author, in the order in which they were sent; of input, its place."""
    call: int
    """Which of several calls that its node made."""
    confidential: bool
    """Whether the message is a private context of its own: a plan, a chain of thought."""
    persona: NotRequired[str]
    """Whose node its author is, behind the subgraphs: `team|alice`. To one persona all its messages are its own."""
    via: NotRequired[str]
    """Of the result of a tool that its author has called: the node that has written it."""
    prompt: NotRequired[dict[str, Any] | None]
    """The handle of what its author was asked, as `plain()` gives it: it stands before the message in the persona's
    own views, and in nobody else's."""
    asked: NotRequired[str]
    """The words of that, with which it is put back where its handle outlived its engine."""
    select: NotRequired[str]
    """As what a `send` hands it on, where it does: `shared` or `reencoded`."""
    borrowed: NotRequired[bool]
    """Made of an agent's message that came without its entry: stands back where there is one."""
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
    unproven: NotRequired[dict[str, Any]]
    """Of input that says to be somebody's (`author`, `persona`), which no seal proves: it is shown to nobody from whom
    that source, or input, is kept."""
    seals: NotRequired[dict[str, str]]
    """By which the entry is known to be of its conversation: without them it does not count."""


def merge_entries(left: list[HandleEntry] | None, right: list[HandleEntry] | None) -> list[HandleEntry]:
    """Reducer of the `handles` channel: append, and replace the entry of a message that was said again."""
    merged = {entry["message_id"]: entry for entry in left or []}
    for entry in right or []:
        known = merged.get(entry["message_id"])
        if known is not None and (
            entry.get("select") or (entry.get("borrowed") and known.get("digest") == entry.get("digest"))
        ):
            continue  # how one branch got it says nothing to the others
        kept = entry.copy()
        kept.pop("select", None)
        kept.pop("behind", None)
        kept.pop("borrowed", None)
        merged[entry["message_id"]] = kept
    return list(merged.values())


class ChoreoState(TypedDict, total=False):
    """What choreographed nodes read and write. Extend it with channels of your own."""

    handles: Annotated[list[HandleEntry], merge_entries]
    messages: Annotated[list[AnyMessage], add_messages]
