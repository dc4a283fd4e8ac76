"""Processes that run threads until they are killed, all forked from one: `python -m torture.durable_worker MODEL`.

That one has imported everything and loaded the model, which takes seconds; an engine it has not. Each of the others is
told threads by a pipe, one a line, runs each up to its next interrupt, and writes all that a caller is told of them
into its journal, each line on the disk before it goes on.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from langchain_core.messages import AIMessageChunk

from choreo_agents import RunOptions
from choreo_agents.errors import LineageWarning
from choreo_agents.models import LoadedModel, load_model, loader
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

    options = RunOptions(seed=seed_of(thread), logits_callback=watch)
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


def work(model: LoadedModel, store: Any, at: str, journal: Journal, jobs: Path) -> None:
    """Run threads as they are told."""
    warnings.simplefilter("error", LineageWarning)
    with Whereabouts(store, at).opened() as (saver, beside), engine_of(model) as engine, jobs.open() as told:
        app = graph().compile(saver, engine=engine, store=beside)
        journal.write("ready")
        for line in told:
            job = json.loads(line)
            try:
                run(app, job["thread"], job["durability"], journal)
            except Exception as error:
                journal.write("failed", thread=job["thread"], error=f"{type(error).__name__}: {error}")
                return


def main(model: str) -> None:
    """Fork processes as they are asked for on stdin, and tell their ids on stdout."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    die_with_parent()
    faulthandler.register(signal.SIGUSR1)  # whoever is stuck says where
    torch.set_num_threads(1)
    loader.usual_device = lambda: "cpu"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    loaded = load_model(model)
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            try:
                work(loaded, wanted["store"], wanted["at"], Journal(wanted["journal"]), Path(wanted["jobs"]))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        print(child, file=told, flush=True)


def die_with_parent() -> None:
    """Not to go on with a thread when whoever asked for it is gone, and has another go on."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
