"""How many ids a directory in actors is asked for and told in a second, and with how many clients it saturates.

    python load/directory.py [--ids 1000000] [--shards 1,2] [--repeats 9] [--out FILE.jsonl] [--plot FILE.png]

As `choreo bench directory`, whose directory is in the process that asks: here each request goes to another process,
and comes back. Clients are tasks of one event loop, as those of a front are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from choreo_ray import RayDirectory
from choreo_ray import directory as directories
from choreo_ray.cluster import Cluster

from choreo_agents.engine.elsewhere.directory import HandleDirectory
from choreo_agents.lab.experiments.bench_directory.measure import KINDS, DirectoryBench, DirectoryHere, FarDirectory
from choreo_agents.lab.experiments.bench_directory.report import DirectoryReport, as_markdown
from choreo_agents.lab.simulating.costs import processor
from choreo_agents.training.journal import Journal

HERE = "in this process"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=DirectoryBench.ids)
    parser.add_argument("--requests", type=int, default=4000, help="of all clients, each time")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--shards", default="1,2", help="actors, with commas between")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a folder of journals: what they have is not measured again")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args(arguments)
    clients = tuple(map(int, asked.clients.split(",")))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
    directories.ANSWER_S = 600.0  # however late: a shard that is given up would count as quick
    actors = map(int, asked.shards.split(","))
    made = {HERE: in_process} | {"in an actor" if each == 1 else f"in {each} actors": of(each) for each in actors}
    reports: dict[str, DirectoryReport] = {}
    for name, make in made.items():
        bench = DirectoryBench(make, ids=asked.ids, requests=asked.requests, clients=clients)
        settings = {"directory": f"Directory {name}", "processor": processor(), "ray": version("ray")}
        settings |= {"ids": bench.ids, "engines": bench.engines, "fronts": bench.fronts, "seed": bench.seed}
        settings |= {"per_request": bench.per_request, "requests": bench.requests, "clients": list(clients)}
        out = None if asked.out is None else asked.out / f"directory-{name.replace(' ', '-')}.jsonl"
        with Journal(out, settings) as journal:
            bench.measure(journal, asked.repeats)
            reports[name] = DirectoryReport(settings, journal.records, asked.repeats)
        print(f"{time.strftime('%H:%M:%S')} {name}: done", flush=True)
    command = f"python load/directory.py --ids {asked.ids} --shards {asked.shards} --repeats {asked.repeats}"
    text = "\n".join(as_markdown(report, command) for report in reports.values())
    print(text)
    if asked.report:
        asked.report.write_text(text)
    if asked.plot:
        drawn(reports, clients, asked.plot)


@asynccontextmanager
async def in_process() -> AsyncIterator[FarDirectory]:
    """A directory in this process."""
    yield DirectoryHere(HandleDirectory())


def of(shards: int) -> Callable[[], AbstractAsyncContextManager[FarDirectory]]:
    """What starts a directory of so many actors, and ends it."""

    @asynccontextmanager
    async def started() -> AsyncIterator[FarDirectory]:
        cluster = Cluster(None, None)
        directory = RayDirectory.start(shards)
        try:
            yield directory
        finally:
            directory.close()
            cluster.close()

    return started


def drawn(reports: Mapping[str, DirectoryReport], clients: Sequence[int], path: Path) -> None:
    """Draw ids a second over clients."""
    import matplotlib  # noqa: PLC0415 - of the plot alone

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, all_axes = pyplot.subplots(1, len(KINDS), figsize=(10, 4), layout="constrained", sharey=True)
    for axes, kind in zip(all_axes, KINDS, strict=True):
        for name, report in reports.items():
            axes.plot(clients, [report.rate(kind, each) for each in clients], marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="clients at once", ylabel="ids/s", title=kind)
        axes.set_xticks(clients, [str(each) for each in clients])
        axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
