"""`choreo inspect`: what an engine holds after a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.terminal.case_options import AgentsOption, RoundsOption
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, ModelOption, errors_as_lines, importing, titled

if TYPE_CHECKING:
    from choreo_agents.engine.introspection import MemoryMap
    from choreo_agents.kv.entry import TierName

_WHERE: Mapping[TierName, str] = {"device": "pool", "host": "host", "disk": "disk", "lineage": "lineage"}
"""What tiers are called here, in their order."""


@takes_loading
def memory(
    model: ModelOption = "embedded",
    agents: AgentsOption = 3,
    rounds: RoundsOption = 3,
    seed: Annotated[int, typer.Option(max=2**32 - 1, help="Chooses the question and the agents' notes.")] = 31,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Tokens of KV that the pool has room for.")] = 4096,
    host_tokens: Annotated[int, typer.Option(min=0, help="Tokens that the host keeps of what left the pool.")] = 0,
    disk: Annotated[Path | None, typer.Option(help="A folder for what has no room there either.")] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Hold a debate, and show who keeps how much KV memory in which tier at its end.

    With a small pool, messages leave it for the host, the disk, or nowhere, and come back, or are computed again from
    their lineage, when they are read. In a program of your own, [b]engine.kv.memory_map()[/b] gives the same.

    [b]Examples[/b]

      choreo inspect memory
      choreo inspect memory --pool-tokens 256 --host-tokens 64 --disk /tmp/kv
      choreo inspect memory --pool-tokens 256 --json
    """
    console = Console(stderr=as_json, highlight=False)
    with importing(console):
        from choreo_agents.engine import Memory
        from choreo_agents.workflows.debating import setting_of
        from choreo_agents.workflows.playing import run_method

    with errors_as_lines(console):
        loaded = load(console, model, loading)
        token = loaded.adapter.geometry.bytes_per_token
        kept = Memory(kv_budget_bytes=pool_tokens * token, host_bytes=host_tokens * token, disk=disk)
        setting = setting_of(loaded, seed, agents=agents, rounds=rounds, reports=0, memory=kept)
        with console.status("holding the debate ..."):
            memory_map = run_method(setting, "choreo").memory
        if as_json:
            typer.echo(json.dumps(memory_map.as_object(), indent=2))
            return
        console.print(_tiers(memory_map))
        console.print(_authors(memory_map))
        console.print(
            f"{memory_map.hit_rate:.0%} of the tokens that calls read or asked for were found encoded. Messages: "
            f"{memory_map.evicted} left the pool, {memory_map.restored_from_host} came back from the host, "
            f"{memory_map.restored_from_disk} from the disk; {memory_map.lost} left the last tier, "
            f"{memory_map.recomputed} were computed again."
        )


def _tiers(found: MemoryMap) -> Table:
    numbers = ("bytes", "tokens", "budget, bytes")
    table = titled("KV memory by tier", ("tier", *numbers), numbers)
    for tier, held in found.tiers.items():
        budget = found.budgets[tier]
        tokens = f"{held // found.bytes_per_token:,}"
        table.add_row(_WHERE[tier], f"{held:,}", tokens, f"{budget:,}" if budget else "none")
    return table


def _authors(found: MemoryMap) -> Table:
    counted = ("messages", "leases", *_WHERE.values(), "pinned")
    table = titled("Tokens by author, and the fastest tier that has them", ("author", *counted), counted)
    for author, kept in found.authors.items():
        numbers = (kept.messages, kept.leases, *(kept.tokens[tier] for tier in _WHERE), kept.pinned_tokens)
        table.add_row(escape(author) or "[dim]nobody named[/]", *(f"{each:,}" if each else "·" for each in numbers))
    return table
