"""The graph of a recording, with an engine as it was recorded with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from choreo_agents.cli.graphs import current_folder, named_graph
from choreo_agents.engine import Engine
from choreo_agents.engine.recording import RecordingHeader, read_recording
from choreo_agents.errors import AdapterError
from choreo_agents.graph import CompiledChoreoGraph
from choreo_agents.terminal.loading import Loading, load

TargetArgument = Annotated[
    str, typer.Argument(help="[b]module:graph[/b]: the graph, compiled or not, or what makes one.")
]
FileArgument = Annotated[Path, typer.Argument(help="What [b]engine.record(path)[/b] has written.")]
RecordedModelOption = Annotated[
    str | None, typer.Option("--model", help="Where the recording's model is; by default where it was.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="That torch computes with; by default as many as then.")
]
RunOption = Annotated[
    list[str] | None,
    typer.Option("--run", help="A function to run after all, by its node; [b]tools[/b]: all functions."),
]
SaltOption = Annotated[
    str, typer.Option(envvar="CHOREO_SALT", help="The tenant's secret, if the engine was recorded with one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")]


@contextmanager
def recorded_app(
    console: Console, target: str, path: Path, model: str | None, threads: int | None, salt: str, loading: Loading
) -> Iterator[CompiledChoreoGraph]:
    """The compiled graph of a recording.

    Args:
        console: Says what is waited for.
        target: Names the graph; what is compiled already keeps its engine.
        path: The recording.
        model: Where its model is; None: where it was.
        threads: Of torch; None: as many as it was recorded with.
        salt: The tenant's.
        loading: How the model is loaded.
    """
    before = torch.get_num_threads()
    try:
        with current_folder():
            yield from _app(console, target, path, model, threads, salt, loading)
    finally:
        torch.set_num_threads(before)


def _app(
    console: Console, target: str, path: Path, model: str | None, threads: int | None, salt: str, loading: Loading
) -> Iterator[CompiledChoreoGraph]:
    header, found = read_recording(path).header, named_graph(target)
    if isinstance(found, CompiledChoreoGraph):
        torch.set_num_threads(threads or int(header.conditions["threads"]))
        yield found
        return
    loaded = load(console, model or header.model, loading)
    torch.set_num_threads(threads or int(header.conditions["threads"]))
    with Engine.load(loaded, **_settings(header), salt=salt) as engine:
        for name, folder in header.adapters.items():
            if name not in engine.adapters:
                engine.load_adapter(folder, name)
        yield found.compile(engine=engine)


def _settings(header: RecordingHeader) -> dict[str, Any]:
    """Of the engine: as it was."""
    if header.adapter is not None and header.adapter not in header.adapters:
        raise AdapterError(f"the recording does not say where its adapter {header.adapter!r} is")
    return {
        "method": header.conditions["method"],
        "seed": header.seed,
        "adapter": None if header.adapter is None else header.adapters[header.adapter],
    }
