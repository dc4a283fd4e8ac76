"""`choreo bench pml`: how it is asked for and shown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.errors import PMLError
from choreo_agents.models import LoadedModel
from choreo_agents.models.random_llama import SHAPES
from choreo_agents.terminal.loading import IN_BF16, Loading, device_name, dtype_name, takes_loading
from choreo_agents.terminal.options import bar, errors_as_lines, numbers, require_writable
from choreo_agents.training.journal import Journal
from choreo_bench.experiments.bench_pml.cases import NEW_TOKENS, PromptCase, case_of_length, example_cases
from choreo_bench.experiments.bench_pml.measure import DEAR_TOKENS, REPEATS, ModuleBench
from choreo_bench.experiments.bench_pml.plot import save_plot
from choreo_bench.experiments.bench_pml.report import COLUMNS, ModuleReport, as_markdown
from choreo_bench.showing.plots import require_plots
from choreo_bench.timing.model import timed_model

LENGTHS, QUICK = "1024,2048,4096,5120,8192,16384", "64,128"
"""Cached tokens, unless told otherwise."""


@takes_loading
def pml(
    model: Annotated[
        str, typer.Option(help=f"[b]embedded[/b], a random Llama ({', '.join(SHAPES)}), or a checkpoint.")
    ] = "smollm2-135m",
    lengths: Annotated[
        str | None,
        typer.Option(help=f"Cached tokens; several with commas.  [default: {LENGTHS}]", show_default=False),
    ] = None,
    new: Annotated[int, typer.Option(min=1, help="Tokens that are encoded with the prompt.")] = NEW_TOKENS,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help=f"Timed rounds, in which all take turns.  [default: {REPEATS}]", show_default=False),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"One round, lengths {QUICK}, unless you give others: to see that it runs."),
    ] = False,
    schemas: Annotated[
        Path, typer.Option(help="A folder of schemas NAME.pml, each with NAME.prompt.pml, that are timed, too.")
    ] = Path("examples/pml/large"),
    rival: Annotated[
        bool, typer.Option("--hugging-face/--no-hugging-face", help="Whether its generate encodes everything, too.")
    ] = True,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every run to this JSONL file, and go on where it stops.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw seconds by length to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = IN_BF16,
) -> None:
    """The first token of a prompt: its modules in every memory, and everything encoded from text (Prompt Cache, 5.4).

    Modules of random words, 1,024 tokens each, are encoded before; the prompt imports all of them, and adds a question.
    Then the same for each schema in a folder. The bars hold the modules on the device against the faster of the two
    full encodings, the engine's own and Hugging Face's.

    [b]Examples[/b]

      choreo bench pml --quick --model six-layers
      choreo bench pml --out runs.jsonl --report pml.md --plot pml.png
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        if plot is not None:
            require_plots()
        require_writable(report)
        require_writable(plot)
        asked = numbers((QUICK if quick else LENGTHS) if lengths is None else lengths)
        rounds = repeats or (1 if quick else REPEATS)
        torch.set_num_threads(threads)
        examples = example_cases(schemas)
        if not examples:
            console.print(f"[dim]no schemas with prompts in {escape(str(schemas))}: see --schemas[/]")
        with _bench(console, model, loading, max(asked) + new, rounds, rival=rival) as bench:
            examples = [case for case in examples if _fits(console, case, bench.model)]
            cases = [*(case_of_length(bench.model, length, new) for length in asked), *examples]
            settings = {
                "model": model,
                "weights": bench.model.adapter.fingerprint if model not in SHAPES else "random",
                "dtype": dtype_name(bench.model.adapter.geometry.dtype),
                "new": new,
                "schemas": str(schemas),
                "threads": threads,
                "device": device_name(bench.model.adapter.device),
                "torch": torch.__version__,
                "transformers": version("transformers"),
            }
            with Journal(out, settings) as journal:
                _measure(console, bench, cases, journal)
                # A journal may hold more than was asked for.
                keys = [key for case in cases for key in bench.counted(case)]
                found = ModuleReport(settings, [journal.records[key] for key in keys])
        if as_json:
            typer.echo(json.dumps(found.as_object(), indent=2))
        else:
            console.print(_table(found))
            for line in found.lines():
                console.print(line, soft_wrap=True)
            console.print(f"[dim]Medians of {rounds}; what encodes more than {DEAR_TOKENS:,} tokens is timed once.[/]")
        if report is not None:
            report.write_text(as_markdown(found, _command(settings, loading, asked, rounds, schemas, rival=rival)))
            console.print(f"[dim]written to {escape(str(report))}[/]")
        if plot is not None:
            save_plot(found, plot)
            console.print(f"[dim]drawn to {escape(str(plot))}[/]")


def _fits(console: Console, case: PromptCase, model: LoadedModel) -> bool:
    """Whether a schema fits into the model's context; says which does not."""
    try:
        case.sizes(model)
    except PMLError as error:
        console.print(f"[dim]{escape(case.name)} is left out: {escape(str(error))}[/]", soft_wrap=True)
        return False
    return True


def _measure(console: Console, bench: ModuleBench, cases: Sequence[PromptCase], journal: Journal) -> None:
    """Under a progress bar."""
    with bar(console) as progress:
        task = progress.add_task("", total=sum(len(bench.runs(case)) for case in cases))
        for case in cases:
            progress.update(task, description=f"{escape(case.name)}: encoding modules")
            bench.measure(
                case,
                journal,
                lambda name, way: progress.update(task, advance=1, description=f"{escape(name)}: {way} done"),
            )


@contextmanager
def _bench(
    console: Console, name: str, loading: Loading, longest: int, repeats: int, *, rival: bool
) -> Iterator[ModuleBench]:
    """A model by name, random weights drawn anew, with a context that is long enough."""
    with timed_model(console, name, loading, longest, "shorter --lengths") as (loaded, path):
        yield ModuleBench(loaded, path if rival else None, loaded.adapter.geometry.dtype, repeats)


_LEFT_OUT = (3, 4)
"""Columns that a terminal has no room for."""


def _table(found: ModuleReport) -> Table:
    shown = [place for place in range(len(COLUMNS)) if place not in _LEFT_OUT]
    table = Table(box=box.SIMPLE_HEAD, title=found.title(), title_justify="left")
    for place in shown:
        table.add_column(COLUMNS[place], justify="left" if place < 2 else "right", no_wrap=place < 2)
    for row in found.rows():
        table.add_row(*(row[place] for place in shown))
    return table


def _command(
    settings: dict[str, Any], loading: Loading, lengths: Sequence[int], repeats: int, schemas: Path, *, rival: bool
) -> str:
    """The command that measures the same again."""
    words = [f"choreo bench pml --model {shlex.quote(settings['model'])}", *loading.words()]
    words += [f"--lengths {','.join(map(str, lengths))} --new {settings['new']} --repeats {repeats}"]
    words += [f"--schemas {shlex.quote(str(schemas))} --threads {settings['threads']}"]
    words += [] if rival else ["--no-hugging-face"]
    return " ".join(words)
