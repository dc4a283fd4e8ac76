"""Whether simulated engines take as long as real ones that are actors: debates on one engine and over two.

    python load/simulate.py [--model PATH] [--debates 32] [--repeats 9] [--out FILE.jsonl] [--plot FILE.png]

As `choreo bench simulate`, whose engines are in one process: each round measures what work costs, a call to an actor
and a copy between two included, records debates one after the other, and holds the same at once on one engine in this
process and over two actors. What is foretold from the recording and the costs stands beside what was measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from choreo_ray import RayEngine

from choreo_agents import Engine, Memory
from choreo_agents.engine.elsewhere import Costs, Routing, route
from choreo_agents.lab.experiments.bench_simulate.measure import ENGINES, FIGURES, SimulateBench
from choreo_agents.lab.experiments.bench_simulate.report import SimulateReport, as_markdown
from choreo_agents.lab.experiments.bench_workflows.scenarios import Lengths
from choreo_agents.lab.simulating.far import MakeFront
from choreo_agents.lab.simulating.measuring import QUICK_PROBE, USUAL_PROBE
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.training.journal import Journal

_NAME = "simulate"


@contextmanager
def actors(model: str) -> Iterator[MakeFront]:
    """What makes fronts over one or two actors, which serve one after the other."""

    def load(engines: int, routing: Routing = route, costs: Costs | None = None) -> RayEngine:
        return RayEngine.load(
            model,
            engines=engines,
            name=f"{_NAME}-{engines}",
            routing=routing,
            costs=costs or Costs(),
            memory=Memory(kv_budget_bytes=1 << 28),
        )

    @contextmanager
    def make_front(
        model: LoadedModel, engines: int, *, routing: Routing = route, costs: Costs | None = None
    ) -> Iterator[Engine]:
        with load(engines, routing, costs) as front:
            yield front

    with ExitStack() as stack:
        for engines in ENGINES:
            stack.callback(RayEngine.end, f"{_NAME}-{engines}")
            stack.enter_context(load(engines))
        yield make_front


def drawn(report: SimulateReport, path: Path) -> None:
    """Draw what was foretold of each round over what was measured."""
    import matplotlib  # noqa: PLC0415 - of the plot alone

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, all_axes = pyplot.subplots(1, len(FIGURES), figsize=(4 * len(FIGURES), 4), layout="constrained")
    for axes, name in zip(all_axes, FIGURES, strict=True):
        most = 0.0
        for engines in ENGINES:
            measured, simulated = (report.values(engines, how, name) for how in ("measured", "simulated"))
            axes.scatter(measured, simulated, label="one engine" if engines == 1 else f"{engines} actors")
            most = max(most, *measured, *simulated)
        line = [0.0, 1.1 * most]
        axes.plot(line, line, color="gray", linewidth=1)
        axes.fill_between(line, [0.85 * each for each in line], [1.15 * each for each in line], color="gray", alpha=0.2)
        axes.set(title=name.replace("_s", ", s").replace("_", " ").replace("per, s", "per s"))
        axes.set(xlabel="measured", ylabel="simulated", xlim=line, ylim=line)
        axes.legend()
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--debates", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="measure costs less often: to see it work")
    parser.add_argument("--out", type=Path, help="a journal: what it has is not measured again")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lengths, said = Lengths(16, 32, 24), ("model", "debates", "quick")
    settings = (
        {name: getattr(asked, name) for name in said} | asdict(lengths) | {"agents": 3, "rounds": 3, "threads": 1}
    )
    settings |= {"dtype": "float32", "device": "cpu", "actors": True}
    settings |= {name: version(name) for name in ("torch", "transformers", "langgraph", "simpy", "ray")}
    loaded = load_model(asked.model)
    with actors(asked.model) as make_front, Journal(asked.out, settings) as journal:
        probe, cores = QUICK_PROBE if asked.quick else USUAL_PROBE, float(os.cpu_count() or 1)
        bench = SimulateBench(loaded, lengths, asked.debates, probe=probe, make_front=make_front, cores=cores)
        bench.measure(journal, asked.repeats, lambda what: print(what, flush=True))
        report = SimulateReport(settings, [journal.records[str(number)] for number in range(asked.repeats)])
    command = f"python load/simulate.py --model {asked.model} --debates {asked.debates} --repeats {asked.repeats}"
    print(as_markdown(report, command))
    if asked.report:
        asked.report.write_text(as_markdown(report, command))
    if asked.plot:
        drawn(report, asked.plot)


if __name__ == "__main__":
    main()
