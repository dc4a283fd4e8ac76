"""`choreo bench step`: how it is asked for and shown."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import load_model
from choreo_agents.models.random_llama import SHAPES, save_random_llama
from choreo_agents.terminal.options import bar, errors_as_lines, require_writable
from choreo_bench.experiments.bench_step.measure import WAYS, measure_steps
from choreo_bench.experiments.bench_step.report import COLUMNS, StepReport, StepShape
from choreo_bench.experiments.bench_step.sampled import COLUMNS as SAMPLED_COLUMNS
from choreo_bench.experiments.bench_step.sampled import SampledReport, measure_sampled

_SHAPES = "1x1,1x16,8x1,8x16,64x16"


def step(
    like: Annotated[
        Literal["embedded", "six-layers", "smollm2-135m"],
        typer.Option(help="The embedded model, or the shape of the random Llama that is served."),
    ] = "embedded",
    shapes: Annotated[str, typer.Option(help="Rows x messages, with commas between.")] = _SHAPES,
    tokens: Annotated[int, typer.Option(min=1, help="That all messages of a shape have together.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that are counted in each round.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of all shapes.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 1,
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Of the weights that are drawn.")] = "bf16",
    sampled: Annotated[
        bool, typer.Option("--sampled", help="What drawing tokens costs a step, instead of where its time goes.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
) -> None:
    """Where the time of a decode step goes, beside the same step through torch's and transformers' own code.

    [b]schedule[/b], [b]plan[/b] and [b]account[/b] are Python's work around a forward pass, in CPU time of the engine's
    thread; [b]forward[/b] is the pass. With [b]--sampled[/b] rows draw at T 0.7 and top-p 0.95 from logits that fall as
    a model's do, and from flat ones, beside greedy rows. Weights that are drawn in bf16 are served as this processor
    serves those.

    [b]Examples[/b]

      choreo bench step
      choreo bench step --shapes 1x1,1x16 --tokens 4096 --like smollm2-135m --threads 2
      choreo bench step --sampled --shapes 32x1 --tokens 4096 --like six-layers --threads 2
      choreo bench step --report step.md
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console), tempfile.TemporaryDirectory() as folder:
        asked = [_shape(each, tokens) for each in shapes.split(",")]
        require_writable(report)
        torch.set_num_threads(threads)
        path: Path | str = like
        if like != "embedded":
            path = Path(folder) / like
            dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
            save_random_llama(SHAPES[like], path, positions=1 << 15, dtype=dtypes[dtype])
        model = load_model(path, device="cpu")
        with bar(console) as progress:
            task = progress.add_task("", total=len(asked) * (4 if sampled else len(WAYS)) * repeats)
            measure, columns = (measure_sampled, SAMPLED_COLUMNS) if sampled else (measure_steps, COLUMNS)
            found: SampledReport | StepReport = measure(
                model,
                asked,
                steps=steps,
                repeats=repeats,
                on_progress=lambda what: progress.update(task, advance=1, description=what),
            )
        command = f"choreo bench step --like {like} --shapes {shapes} --tokens {tokens} --steps {steps}"
        command += f" --repeats {repeats} --threads {threads}" + (f" --dtype {dtype}" if like != "embedded" else "")
        command += " --sampled" if sampled else ""
        if report is not None:
            report.write_text(found.as_markdown(command))
            console.print(f"[dim]written to {escape(str(report))}[/]")
        if as_json:
            typer.echo(json.dumps(found.as_object(), indent=2))
            return
        table = Table(box=box.SIMPLE_HEAD, title=found.title(), title_justify="left", padding=0)
        for place, column in enumerate(columns):
            table.add_column(column, justify="left" if place == 2 else "right", no_wrap=True)
        for row in found.rows():
            table.add_row(*row)
        console.print(table)
        for line in found.lines():
            console.print(line)


def _shape(said: str, tokens: int) -> StepShape:
    rows, times, messages = said.strip().partition("x")
    if not times or not rows.isdecimal() or not messages.isdecimal() or "0" in (rows, messages):
        raise InvalidRequestError(f"a shape is ROWSxMESSAGES, such as 64x16, not {said!r}")
    each = tokens // int(messages)
    if not each:
        raise InvalidRequestError(f"{tokens} tokens are not enough for {messages} messages: give --tokens {messages}")
    return StepShape(int(rows), int(messages), each)
