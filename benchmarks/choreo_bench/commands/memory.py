"""`choreo pml memory`: what a cached token takes."""

from __future__ import annotations

from typing import Annotated

import typer

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption
from choreo_bench.harness import output


@takes_loading
def memory(
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Folder or hub name of a model besides embedded; repeatable.")
    ] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Show what a cached token takes in each memory: measured, for the embedded model and any others.

    [b]Example[/b]

      choreo pml memory --model path/or/hub-name
    """
    with output(as_json) as out:
        from choreo_bench.experiments.pml_memory import memory_report, token_memory

        names = dict.fromkeys(["embedded", *(model or [])])
        out.finish(memory_report({name: token_memory(load(out.console, name, loading)) for name in names}))
