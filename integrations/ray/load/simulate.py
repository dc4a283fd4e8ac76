"""Whether simulated engines take as long as real ones that are actors: runs on one engine and over two.

    python load/simulate.py [--model PATH] [--workload debates] [--debates 32] [--repeats 9] [--out FILE.jsonl]
        [--plot FILE.png]

As `choreo bench simulate`, whose engines are in one process: each round measures what work costs, a call to an actor
and a copy between two included, records debates one after the other, and holds the same at once on one engine in this
process and over two actors. What is foretold from the recording and the costs stands beside what was measured.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from choreo_ray import ClusterError, RayEngine

from choreo_agents import Engine, Memory
from choreo_agents.engine.elsewhere import Costs, Routing, route
from choreo_agents.lab.experiments.bench_routing.workloads import WORKLOADS, lengths_of
from choreo_agents.lab.experiments.bench_simulate.measure import DEBATES, ENGINES, FIGURES, SimulateBench
from choreo_agents.lab.experiments.bench_simulate.report import WORDS, SimulateReport, as_markdown
from choreo_agents.lab.experiments.bench_workflows.scenarios import Lengths
from choreo_agents.lab.simulating.far import MakeFront
from choreo_agents.lab.simulating.measuring import QUICK_PROBE, USUAL_PROBE
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.tracing import EventSink, discard
from choreo_agents.training.journal import Journal

_NAME = "simulate"
_TRUNK = 1000
"""Tokens of the document that `sends` are about."""


@contextmanager
def actors(model: str) -> Iterator[MakeFront]:
    """What makes fronts over one or two actors, which serve one after the other."""

    def load(
        engines: int, routing: Routing = route, costs: Costs | None = None, sink: EventSink = discard
    ) -> RayEngine:
        return RayEngine.load(
            model,
            engines=engines,
            num_cpus=0.5,  # one or two of the three compute at a time
            name=f"{_NAME}-{engines}",
            routing=routing,
            costs=costs or Costs(),
            sink=sink,
            memory=Memory(kv_budget_bytes=1 << 28),
        )

    @contextmanager
    def make_front(
        model: LoadedModel,
        engines: int,
        *,
        routing: Routing = route,
        costs: Costs | None = None,
        sink: EventSink = discard,
    ) -> Iterator[Engine]:
        with load(engines, routing, costs, sink) as front:
            yield front

    def end(engines: int) -> None:
        with suppress(ClusterError):  # one that was started for them has ended with them
            RayEngine.end(f"{_NAME}-{engines}")

    with ExitStack() as stack:
        for engines in ENGINES:
            stack.callback(end, engines)
        for engines in ENGINES:
            stack.enter_context(load(engines))
        yield make_front


def drawn(report: SimulateReport, path: Path) -> None:
    """Draw what was foretold of each round over what was measured."""
    import matplotlib  # noqa: PLC0415 - of the plot alone

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    shown = [name for name in FIGURES if any(report.values(ENGINES[-1], "measured", name))]
    figure, all_axes = pyplot.subplots(1, len(shown), figsize=(4 * len(shown), 4), layout="constrained")
    for axes, name in zip(all_axes, shown, strict=True):
        what, unit = WORDS[name]
        most = 0.0
        for engines in ENGINES:
            measured, simulated = (
                [unit * each for each in report.values(engines, how, name)] for how in ("measured", "simulated")
            )
            axes.scatter(measured, simulated, label="one engine" if engines == 1 else f"{engines} actors")
            most = max(most, *measured, *simulated)
        line = [0.0, 1.1 * most]
        axes.plot(line, line, color="gray", linewidth=1)
        axes.fill_between(line, [0.85 * each for each in line], [1.15 * each for each in line], color="gray", alpha=0.2)
        axes.set(title=what, xlabel="measured", ylabel="simulated", xlim=line, ylim=line)
        axes.legend()
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default=DEBATES)
    parser.add_argument("--debates", type=int, default=32, help="runs at once, of whatever workload")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="measure costs less often: to see it work")
    parser.add_argument("--out", type=Path, help="a journal: what it has is not measured again")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lengths = lengths_of(asked.workload, Lengths(16, 32, 24), _TRUNK)
    said = ("model", "workload", "debates", "quick")
    settings = (
        {name: getattr(asked, name) for name in said} | asdict(lengths) | {"agents": 3, "rounds": 3, "threads": 1}
    )
    settings |= {"dtype": "float32", "device": "cpu", "actors": True}
    settings |= {name: version(name) for name in ("torch", "transformers", "langgraph", "simpy", "ray")}
    loaded = load_model(asked.model)
    with actors(asked.model) as make_front, Journal(asked.out, settings) as journal:
        sizes = {"debates": asked.debates, "workload": asked.workload}
        probe = QUICK_PROBE if asked.quick else USUAL_PROBE
        bench = SimulateBench(loaded, lengths, **sizes, probe=probe, make_front=make_front)
        bench.measure(journal, asked.repeats, lambda what: print(what, flush=True))
        report = SimulateReport(settings, [journal.records[str(number)] for number in range(asked.repeats)])
    command = f"python load/simulate.py --model {asked.model} --workload {shlex.quote(asked.workload)}"
    command += f" --debates {asked.debates} --repeats {asked.repeats}"
    print(as_markdown(report, command))
    if asked.report:
        asked.report.write_text(as_markdown(report, command))
    if asked.plot:
        drawn(report, asked.plot)


if __name__ == "__main__":
    main()
