"""The `choreo` command and its built-in commands; other distributions add more: `choreo_agents.terminal.commands`."""

from __future__ import annotations

from typing import Annotated

import typer

from choreo_agents.cli import models, pml
from choreo_agents.cli.audit import audit
from choreo_agents.cli.compare import compare
from choreo_agents.cli.inspect import memory
from choreo_agents.cli.recordings import fork, record, replay, run
from choreo_agents.cli.run_workflow import run_workflow
from choreo_agents.terminal.commands import group
from choreo_agents.workflows.cases import CASES

RUN = group(
    "Run a workflow and watch it.",
    lambda: {name.replace("_", "-"): run_workflow(case) for name, case in CASES.items()},
)
MODELS = group(
    "Check whether a model can be served, and show its prompts.\n\nStart with [b]choreo models check PATH[/b] on a "
    "folder or hub name: it needs only config.json and the tokenizer's files, no weights, and exits with 0 if the "
    "model can be served here, else with 2.",
    lambda: {"check": models.check},
)
INSPECT = group("Inspect what an engine holds, or has done.", lambda: {"memory": memory, "record": record, "run": run})
PML = group(
    "Schemas whose modules are encoded once, and their prompts.",
    lambda: {"check": pml.check, "layout": pml.layout, "run": pml.run_prompt},
)
app = group(
    "LangGraph agents that hand each other [b]KV-cache handles[/b] instead of strings.\n\n"
    "Start with [b]choreo run debate[/b]: three agents debate on the embedded model.",
    lambda: {
        "run": RUN,
        "audit": audit,
        "compare": compare,
        "replay": replay,
        "fork": fork,
        "models": MODELS,
        "inspect": INSPECT,
        "pml": PML,
    },
)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"choreo-agents {version('choreo-agents')}")
        raise typer.Exit


@app.callback()
def choreo(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Entry point of the `choreo` command."""
    app()
