"""Files that somebody else has written, or a disk has: typed errors in bounded time, and nothing lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from safetensors import SafetensorError

from choreo_agents import Engine, Memory
from choreo_agents.chat.turns import tool_calls_of
from choreo_agents.engine.recording.format import read_recording
from choreo_agents.errors import ChoreoError, PMLError
from choreo_agents.kv.store import store
from choreo_agents.models.checking import needs
from choreo_agents.pml import Schema, SchemaLibrary
from choreo_agents.training.journal import Journal, read_journal
from choreo_agents.training.trace import read_traces
from choreo_agents.workflows.cases import CASES, read_items

DEEP = 100_000
LONG = 5.0
"""Seconds that no file may take, on whatever machine: each takes milliseconds."""
HOSTILE = {
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "no JSON": b"{",
    "nested": b"[" * DEEP + b"]" * DEEP,
    "nested objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a number": b"7",
    "NaN": b"NaN",
    "too large a number": b"1" * 5000,
    "another kind": b'{"kind": 5}',
}


def read_as_journal(path: Path) -> object:
    with Journal(path, {"of": "this"}) as journal:
        return journal.records


READERS: dict[str, tuple[str, Callable[[Path], Any], bytes]] = {
    "a journal that is gone on with": ("run.jsonl", read_as_journal, b'{"settings": {"of": "this"}}\n'),
    "a journal that is read": ("run.jsonl", read_journal, b'{"settings": {}}\n'),
    "traces": ("traces.jsonl", read_traces, b'{"settings": {}}\n'),
    "a recording": ("run.jsonl", read_recording, b""),
    "items of a workflow": ("items.jsonl", partial(read_items, CASES["direct"]), b""),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", HOSTILE)
def test_lines_that_are_none_are_a_typed_error_and_stay_as_they_are(tmp_path: Path, reader: str, content: str) -> None:
    name, read, head = READERS[reader]
    path = tmp_path / name
    path.write_bytes(head + HOSTILE[content] + b"\n")
    before, started = path.read_bytes(), time.monotonic()
    with pytest.raises(ChoreoError, match=r"line|journal|recording|results|items|trace"):
        read(path)
    assert time.monotonic() - started < LONG and path.read_bytes() == before


@pytest.mark.parametrize("version", [0, 3, 99, "1", None, [1], {"a": 1}])
def test_a_recording_of_another_version_says_so(tmp_path: Path, version: object) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"kind": "header", "format": version}) + "\n")
    with pytest.raises(ChoreoError, match=r"has format .*this version reads|is not a recording"):
        read_recording(path)


@pytest.mark.parametrize("content", HOSTILE)
def test_an_index_of_weights_that_is_none_is_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(HOSTILE[content])
    with pytest.raises(OSError, match="damaged"):
        needs._weight_files(tmp_path)
    header = HOSTILE[content]
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(OSError, match="damaged"):
        needs.StoredWeights.read(tmp_path)


def test_arguments_of_a_call_in_a_block_may_be_nested_without_end() -> None:
    """A message may be anybody's."""
    block = {"type": "tool_use", "name": "f", "input": "[" * DEEP, "id": "1"}
    [call] = tool_calls_of(AIMessage([block]))
    assert (call.name, call.arguments) == ("f", {"": "[" * DEEP})


@pytest.mark.parametrize(
    "text",
    [
        "<schema name='s' version='9'><module name='a'>A.</module></schema>",
        "<prompt2><a/></prompt2>",
        "<schema name='s'>" + "<module name='a'>" * 2000,
        "<schema name='s'>" + "".join(f"<module name='m{n}'>" for n in range(500)) + "</module>" * 500 + "</schema>",
        "<!DOCTYPE s [<!ENTITY a 'b'>]><schema name='s'>&a;</schema>",
    ],
    ids=["another version", "another element", "cut", "nested", "entities"],
)
def test_markup_of_another_kind_is_told_line_by_line(text: str) -> None:
    started = time.monotonic()
    with pytest.raises(PMLError):
        Schema.from_text(text)
    assert time.monotonic() - started < LONG


def test_a_full_disk_loses_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema.from_text("<schema name='s'><module name='a'>The record says nine.</module></schema>")
    memory = Memory(persist_dir=tmp_path)
    with Engine.load("embedded", memory=memory, salt="s") as engine, SchemaLibrary(engine) as library:
        with monkeypatch.context() as full:

            def no_room(*_: object, **__: object) -> None:
                raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

            full.setattr(store, "save_file", no_room)
            with pytest.raises(OSError, match=r"cannot be written.*No space left"):
                library.register(schema, encode="eager")
            assert library.schemas == ("s",) and {each.place for each in library.modules("s")} <= {"device", "nowhere"}
            assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.partial")]
        library.register(schema, encode="eager")
        assert [*tmp_path.rglob("*.safetensors")], "once there is room it is written"
