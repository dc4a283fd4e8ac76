"""The `choreo` command."""

from __future__ import annotations

import typer

from choreo_agents.cli.audit import audit
from choreo_agents.cli.bench import bench_app
from choreo_agents.cli.bench_engine import engine
from choreo_agents.cli.bench_pml import pml as bench_pml
from choreo_agents.cli.bench_synthesis import synthesis
from choreo_agents.cli.bench_workflows import workflows
from choreo_agents.cli.dilemma import eval_dilemma, run_dilemma
from choreo_agents.cli.eval_pml import pml as eval_pml
from choreo_agents.cli.eval_synthesis import synthesis as eval_synthesis
from choreo_agents.cli.evaluate import eval_app
from choreo_agents.cli.inspect import inspect_app
from choreo_agents.cli.models import models_app
from choreo_agents.cli.pml import pml_app
from choreo_agents.cli.pml_run import memory, run_prompt
from choreo_agents.cli.run import run_app
from choreo_agents.cli.train import train_app
from choreo_agents.cli.tuned import tuned
from choreo_agents.cli.untuned import untuned

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="LangGraph agents that hand each other [b]KV-cache handles[/b] instead of strings.\n\n"
    "Start with [b]choreo run debate[/b]: three agents debate on the embedded model.",
)
run_app.command("dilemma")(run_dilemma)
app.add_typer(run_app, name="run")
app.command()(audit)
eval_app.command("dilemma")(eval_dilemma)
eval_app.command()(untuned)
eval_app.command()(tuned)
eval_app.command("synthesis")(eval_synthesis)
eval_app.command("pml")(eval_pml)
app.add_typer(eval_app, name="eval")
bench_app.command()(engine)
bench_app.command()(workflows)
bench_app.command()(synthesis)
bench_app.command("pml")(bench_pml)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.add_typer(models_app, name="models")
app.add_typer(inspect_app, name="inspect")
pml_app.command("run")(run_prompt)
pml_app.command()(memory)
app.add_typer(pml_app, name="pml")


def main() -> None:
    """Entry point of the `choreo` command."""
    app()


__all__ = ["app", "main"]
