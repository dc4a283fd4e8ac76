"""`choreo store`: whether what runs need to go on is whole, and how it stays small."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from choreo_agents.terminal.options import JsonOption, bar, errors_as_lines
from choreo_agents.terminal.waiting import importing

if TYPE_CHECKING:
    from choreo_agents.graph.durable.upkeep import CompactedStore, StoreReport
    from choreo_agents.graph.durable.upkeep.contents import OnProgress

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_FAILED = 2
"""The exit code of a store that cannot be read: 1 says that it can, and what was found."""

PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE_OR_URL",
        help="The file of a SQLite checkpointer, the [b].lineage[/b] beside it, or [b]postgresql://...[/b].",
    ),
]


def check(
    place: PlaceArgument,
    salt_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file with a tenant's salt: seals of what it has written are checked, too. May come again."
        ),
    ] = None,
    most: Annotated[int, typer.Option(min=0, help="Findings that are named one by one.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Read all of a store: what is damaged, what is missing, and what nobody needs.

    Every row, note and holder is read. Nothing is written, and runs may go on meanwhile. The exit code is 0 if nothing
    was found, 1 if something was, 2 if the store cannot be read. A salt is read from a file, since others of the
    machine see what stands in a command; without one, seals are not looked at.

    [b]Examples[/b]

      choreo store check states.sqlite
      choreo store check states.sqlite --salt-file salt.txt
      choreo store check postgresql://user@host/runs --json
    """
    console = Console(stderr=as_json, highlight=False)
    with importing(console):
        from choreo_agents.graph.durable.upkeep import check_store, store_at

    with errors_as_lines(console, code=_FAILED):
        salts = [_salt(path) for path in salt_file or ()]
        with store_at(place) as store, _counting(console, "reading") as on_progress:
            report = check_store(store, salts=salts, on_progress=on_progress)
    if as_json:
        typer.echo(json.dumps(_checked(report), indent=2))
    else:
        _show(console, report, most)
    raise typer.Exit(1 if report.findings else 0)


def compact(
    place: PlaceArgument,
    older_than: Annotated[
        str | None,
        typer.Option(help="Forget threads that were last written to longer ago: [b]90m[/b], [b]36h[/b], [b]30d[/b]."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, and say what would be.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete what nobody needs, and threads that nobody has written to for long; make the file smaller.

    Rows without holders and holders without notes go. With [b]--older-than[/b] old threads go, too, with all that no
    other thread needs: no salt is needed for that, since they are called by their names in the store, and those do not
    tell their ids. Their checkpoints stay: who goes on with one has its words encoded again. Runs may go on meanwhile;
    a file is locked while it is written anew.

    [b]Examples[/b]

      choreo store compact states.sqlite --older-than 30d --dry-run
      choreo store compact states.sqlite --older-than 30d
      choreo store compact postgresql://user@host/runs --json
    """
    console = Console(stderr=as_json, highlight=False)
    with importing(console):
        from choreo_agents.graph.durable.upkeep import compact_store, store_at

    with errors_as_lines(console, code=_FAILED):
        age = None if older_than is None else _age(older_than)
        with store_at(place) as store, _counting(console, "reading") as on_progress:
            done = compact_store(store, older_than=age, dry_run=dry_run, on_progress=on_progress)
    if as_json:
        typer.echo(json.dumps({**asdict(done), "threads": [list(each) for each in done.threads]}, indent=2))
        return
    _tell(console, done)


def _salt(path: Path) -> str:
    salt = path.read_text().strip("\r\n")
    if not salt:
        raise ValueError(f"there is no salt in {str(path)!r}")
    return salt


def _age(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if found is None or not int(found[1]):
        raise ValueError(f"--older-than is a number with s, m, h, d or w behind it, as 30d, not {text!r}")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


@contextmanager
def _counting(console: Console, what: str) -> Iterator[OnProgress]:
    if not console.is_terminal:
        yield lambda done: None
        return
    with bar(console) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done: progress.update(task, completed=done)


def _checked(report: StoreReport) -> dict[str, Any]:
    told = asdict(report)
    findings = told.pop("findings")
    return {**told, "counts": report.counts(), "findings": findings}


def _show(console: Console, report: StoreReport, most: int) -> None:
    from choreo_agents.graph.durable.upkeep import FINDINGS

    seals = f"{report.sealed:,} seals hold" if report.sealed else "seals were not looked at"
    console.print(
        f"{report.rows:,} rows, {report.notes:,} notes and {report.holders:,} holders of {report.threads:,} threads "
        f"and {report.tenants:,} tenants; {seals}",
        soft_wrap=True,
    )
    if not report.findings:
        console.print("[green]nothing wrong[/]")
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("found")
    table.add_column("", justify="right")
    table.add_column("what that means")
    for kind, count in report.counts().items():
        table.add_row(kind, f"{count:,}", FINDINGS[kind])
    console.print(table)
    for finding in report.findings[:most]:
        place = f"tenant {finding.tenant}" + (f", thread {finding.thread}" if finding.thread else "")
        why = f": {finding.why}" if finding.why else ""
        console.print(f"{finding.what} {finding.id} ({place}){why}", markup=False, soft_wrap=True)
    if len(report.findings) > most:
        console.print(f"[dim]and {len(report.findings) - most:,} more: --most, or --json for all of them[/]")


def _tell(console: Console, done: CompactedStore) -> None:
    would = "would be " if done.is_rehearsal else ""
    console.print(
        f"{would}deleted: {len(done.threads):,} threads with {done.notes:,} notes, {done.rows:,} rows, "
        f"{done.holders:,} holders",
        soft_wrap=True,
    )
    for tenant, thread in done.threads:
        console.print(f"thread {thread} of tenant {tenant}", markup=False, soft_wrap=True)
    if done.bytes_before is not None and done.bytes_after is not None:
        freed = done.bytes_before - done.bytes_after
        console.print(f"freed: {freed:,} bytes; the file has {done.bytes_after:,}", soft_wrap=True)
