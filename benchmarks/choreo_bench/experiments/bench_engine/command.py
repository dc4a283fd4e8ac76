"""`choreo bench engine`: how it is asked for and shown."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models.random_llama import SHAPES, save_random_llama
from choreo_agents.terminal.options import errors_as_lines, require_writable
from choreo_bench.experiments.bench_engine import SCENARIOS, SpeedReport, SpeedScenario, measure_all, scaled
from choreo_bench.experiments.bench_engine.bars import bars, losses
from choreo_bench.experiments.bench_engine.measure import PARTS
from choreo_bench.experiments.bench_engine.plot import save_plot
from choreo_bench.showing.plots import require_plots

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def engine(
    like: Annotated[
        Literal["six-layers", "smollm2-135m"], typer.Option(help="The shape of the random Llama that is served.")
    ] = "six-layers",
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Of weights and KV.")] = "bf16",
    only: Annotated[list[str] | None, typer.Option("--only", help="Scenarios whose name has this in it.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each rival; they take turns.")] = 5,
    scale: Annotated[float, typer.Option(min=0.001, max=1.0, help="Share of the messages' lengths.")] = 1.0,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the tables to this Markdown file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the run to this PNG file.")] = None,
) -> None:
    """First tokens and decode steps, beside every other engine that is installed, on the same weights.

    [b]no attention[/b] is the model's other operations on the same rows, as transformers runs them; engines with
    operations of their own can be faster. [b]attention calls alone[/b] is one folded call for each shared segment.
    Their sum is what the engine is held against. Engines that are not installed are named as absent. Each scenario is
    shown, and written, as it ends.

    [b]Examples[/b]

      choreo bench engine --scale 0.05 --repeats 2
      choreo bench engine --only "first token"
      choreo bench engine --like smollm2-135m --dtype fp32 --out speed.md --plot speed.png
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        chosen = [s for s in SCENARIOS if not only or any(part in s.name for part in only)]
        if not chosen:
            raise InvalidRequestError(f"no scenario is named so: there are {', '.join(s.name for s in SCENARIOS)}")
        chosen = [scaled(scenario, scale) for scenario in chosen]
        if plot is not None:
            require_plots()
        require_writable(out)
        require_writable(plot)
        torch.set_num_threads(threads)
        command = f"choreo bench engine --like {like} --dtype {dtype} --repeats {repeats} --threads {threads}"
        command += f" --scale {scale}" if scale != 1.0 else ""
        command += "".join(f' --only "{part}"' for part in only or ())

        def ended(so_far: SpeedReport, scenario: SpeedScenario) -> None:
            if not as_json:
                console.print(_table(so_far, scenario))
            if out is not None:
                out.write_text(as_markdown(so_far, chosen, command, scale))

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / like
            with console.status("drawing weights ...") as status:
                save_random_llama(SHAPES[like], path, positions=1 << 15)
                report = measure_all(
                    path,
                    _DTYPES[dtype],
                    chosen,
                    repeats=repeats,
                    on_progress=lambda scenario, rival: status.update(f"{scenario}: {rival} ..."),
                    on_scenario=ended,
                )
        if as_json:
            typer.echo(json.dumps(report.as_object(), indent=2))
        else:
            for line in _summary(report, scale):
                console.print(line)
        if plot is not None:
            save_plot(report, plot)
            console.print(f"[dim]drawn to {plot}[/]")
        if out is not None:
            console.print(f"[dim]written to {out}[/]")


def _rows(report: SpeedReport, scenario: SpeedScenario) -> list[tuple[str, str, str, str, str]]:
    """Rival, milliseconds, spread, against choreo, against the sum of parts."""
    found = report.results[scenario.name]
    ours, floor = found["choreo"].middle, report.sum_of_parts(scenario.name)
    rows: list[tuple[str, str, str, str, str]] = []
    for name, measured in found.items():
        if measured.absent:
            rows.append((name, "-", measured.absent, "", ""))
            continue
        low, high = measured.spread
        spread = f"{_ms(low)} to {_ms(high)}"
        against = "" if name in ("choreo", *PARTS) else f"{measured.middle / ours:.2f}x"
        rows.append((name, _ms(measured.middle), spread, against, f"{measured.middle / floor:.2f}x"))
    rows.append(("the sum: no attention + calls alone", _ms(floor), "", "", "1.00x"))
    return rows


def _summary(report: SpeedReport, scale: float) -> list[str]:
    """The bars, and what is lost when what is shared grows; nothing for shorter messages than they are meant for."""
    if scale != 1.0:
        return []
    lines: list[str] = []
    for bar in bars(report):
        wanted = f"{'at least' if bar.at_least else 'at most'} {bar.wanted:g}x"
        if bar.found is None:
            lines.append(f"not measured: {bar.what}, {wanted}")
        else:
            lines.append(f"{'met' if bar.met else 'missed'}: {bar.what}, {wanted}: {bar.found:.2f}x")
    lost = losses(report)
    if lost:
        each = ", ".join(f"{loss.rival} {100 * loss.share:.0f} %" for loss in lost)
        lines.append(f"throughput lost from 1k to 16k shared, 32 branches: {each}")
    return lines


_COLUMNS = ("", "ms", "spread", "time / choreo's", "time / sum")


def _table(report: SpeedReport, scenario: SpeedScenario) -> Table:
    what = "a decode step" if scenario.is_decode else "to the first token"
    title = f"{scenario.name}: ms {what}, {report.model}, {report.dtype}, {report.threads} threads"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if not column else "right")
    for row in _rows(report, scenario):
        table.add_row(*row)
    return table


def as_markdown(report: SpeedReport, scenarios: list[SpeedScenario], command: str, scale: float) -> str:
    """The tables of what was run so far, with what it takes to measure them again."""
    lines = [
        f"`{command}`",
        "",
        f"torch {report.torch_version}, transformers {report.transformers_version}, "
        f"medians of {report.repeats} runs that take turns.",
        "",
    ]
    for scenario in (each for each in scenarios if each.name in report.results):
        lines += [f"### {scenario.name}", "", f"| {' | '.join(_COLUMNS)} |", "|---|--:|--:|--:|--:|"]
        lines += [f"| {' | '.join(row)} |" for row in _rows(report, scenario)]
        lines.append("")
    lines += [f"- {line}" for line in _summary(report, scale)]
    lines.append("")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
