"""A process that runs threads until it is killed: `python -m torture.durable_worker MODEL STORE AT JOURNAL`.

It is told threads on stdin, one a line, runs each up to its next interrupt, and writes all that a caller is told of
them into its journal, each line on the disk before it goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import warnings
from typing import Any

import torch
from langchain_core.messages import AIMessageChunk

from choreo_agents import RunOptions
from choreo_agents.errors import LineageWarning
from choreo_agents.models import load_model, loader
from torture.durable_program import Whereabouts, engine_of, graph, next_input, seed_of


class Journal:
    """What outlives its process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, kind: str, **told: Any) -> None:
        os.write(self._file, json.dumps({"kind": kind, **told}).encode() + b"\n")
        os.fsync(self._file)


def run(app: Any, thread: str, durability: str, journal: Journal) -> None:
    """Run a thread up to its next interrupt, or its end."""

    decoded: set[Any] = set()

    def watch(*place: Any) -> Any:
        def show(_: object) -> None:
            if place not in decoded:
                decoded.add(place)
                journal.write("decoded", thread=thread, place=place)

        return show

    options = RunOptions(seed=seed_of(thread), watch=watch)
    config: Any = {"configurable": {"thread_id": thread, "choreo": options}}
    snapshot = app.get_state(config)
    unfinished, given = next_input(thread, snapshot)
    journal.write("begun", thread=thread, next=snapshot.next, at=snapshot.metadata)
    if unfinished:
        for kind, part in app.stream(given, config, stream_mode=["updates", "messages"], durability=durability):
            if kind == "updates":
                _tell_update(journal, thread, part)
            elif isinstance(part[0], AIMessageChunk) and str(part[0].text):
                chunk, told = part
                at = [told["langgraph_node"], told["langgraph_step"], str(told["langgraph_path"])]
                journal.write("token", thread=thread, at=at, id=chunk.id, text=str(chunk.text))
    journal.write("over", thread=thread, ended=not app.get_state(config).tasks)


def _tell_update(journal: Journal, thread: str, part: Any) -> None:
    for node, update in part.items():
        if not isinstance(update, dict):
            continue
        words = {message.id: str(message.text) for message in update.get("messages") or []}
        said = [
            {
                "place": [entry["author"], entry["superstep"], entry["branch"], entry.get("call", 0)],
                "id": entry["message_id"],
                "handle": entry["handle"]["id"],
                "words": words.get(entry["message_id"]),
            }
            for entry in update.get("handles") or []
        ]
        journal.write("update", thread=thread, node=node, said=said)


def main(model: str, store: Any, at: str, path: str) -> None:
    """Run threads as they are told."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it does not outlive whoever tells it
    torch.set_num_threads(1)
    loader.usual_device = lambda: "cpu"
    journal = Journal(path)
    loaded = load_model(model)
    warnings.simplefilter("error", LineageWarning)
    journal.write("ready")
    first = sys.stdin.readline()
    if not first:
        return
    with Whereabouts(store, at).opened() as (saver, beside), engine_of(loaded) as engine:
        app = graph().compile(saver, engine=engine, store=beside)
        line = first
        while line:
            job = json.loads(line)
            try:
                run(app, job["thread"], job["durability"], journal)
            except Exception as error:
                journal.write("failed", thread=job["thread"], error=f"{type(error).__name__}: {error}")
                os._exit(3)
            line = sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
