"""Entries are the same however LangGraph puts their updates together again."""

from hypothesis import given
from hypothesis import strategies as st
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.graph import StateGraph
from langgraph.types import Overwrite

from choreo_agents.graph.state import ChoreoState, HandleEntry, merge_entries, merge_updates


@st.composite
def entries(draw: st.DrawFn) -> HandleEntry:
    """Few messages, and all that decides how two entries of one come together."""
    model = draw(st.sampled_from("mn"))
    entry = HandleEntry(
        handle={"id": draw(st.sampled_from("xyz")) * 32, "model": model, "length": 1},
        author=draw(st.sampled_from("ab")),
        superstep=draw(st.integers(0, 2)),
        branch=0,
        call=0,
        confidential=False,
        message_id=draw(st.sampled_from("123")),
        digest=draw(st.sampled_from("de")),
    )
    handle_id = entry["handle"]["id"]
    if draw(st.booleans()):
        entry["signature"] = {"entry": "e", handle_id: "s"}
    if draw(st.booleans()):
        entry["handles_by_model"] = {"o": {"id": "w" * 32, "model": "o", "length": 1}}
    mark = draw(st.sampled_from(["", "select", "borrowed"]))
    if mark == "select":
        entry["select"], entry["behind"] = "shared", 1
    elif mark == "borrowed":
        entry["borrowed"] = True
    return entry


updates = st.lists(st.lists(entries(), max_size=3), max_size=8)


def channel() -> DeltaChannel:
    found = StateGraph(ChoreoState).channels["handles"]
    assert isinstance(found, DeltaChannel) and found.snapshot_frequency == 5
    return found.from_checkpoint([])


@given(updates, st.integers(0, 8))
def test_updates_are_merged_in_batches_as_one_by_one(said: list[list[HandleEntry]], cut: int) -> None:
    whole: list[HandleEntry] = []
    for update in said:
        whole = merge_entries(whole, update)
    assert merge_updates(None, said) == merge_updates([], said) == whole
    assert merge_updates(merge_updates([], said[:cut]), said[cut:]) == whole


@given(updates, st.data())
def test_a_channel_holds_the_same_whatever_of_it_was_kept(said: list[list[HandleEntry]], data: st.DataObject) -> None:
    """Live, superstep by superstep; read again from what was written; and so from a whole one kept in between."""
    supersteps, left = [], said
    while left:
        size = data.draw(st.integers(1, len(left)))
        supersteps, left = [*supersteps, left[:size]], left[size:]
    overwritten = data.draw(st.sampled_from([None, *range(len(supersteps))]))
    if overwritten is not None:
        supersteps[overwritten] = [Overwrite(supersteps[overwritten][0])]
    live, kept = channel(), [_DeltaSnapshot([])]
    for superstep in supersteps:
        live.update(superstep)
        kept.append(_DeltaSnapshot(live.get()))
    for start, snapshot in enumerate(kept):
        read = live.from_checkpoint(snapshot)
        read.replay_writes([("task", "handles", write) for superstep in supersteps[start:] for write in superstep])
        assert read.get() == live.get()
