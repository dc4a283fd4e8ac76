"""`choreo inspect memory`: shows the KV memory that an engine holds after a run, by tier and author."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, ModelOption, command_console, titled


@takes_loading
def memory(
    model: ModelOption = "embedded",
    seed: Annotated[int, typer.Option(max=2**32 - 1, help="Seed of the question and the agents' notes.")] = 31,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Capacity of the KV pool, in tokens.")] = 4096,
    host_tokens: Annotated[int, typer.Option(min=0, help="Capacity of host memory for evicted KV, in tokens.")] = 0,
    disk: Annotated[Path | None, typer.Option(help="Folder for KV that fits into neither.")] = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Run a debate, and show at its end how much KV memory each agent's messages take in each tier.

    With a small pool, messages are offloaded to the host or the disk, or evicted. When they are read they are copied
    back, or encoded again from their lineage. In your own program, [b]engine.kv.memory_map()[/b] returns the same.

    [b]Examples[/b]

      choreo inspect memory
      choreo inspect memory --pool-tokens 256 --host-tokens 64 --disk /tmp/kv
      choreo inspect memory --pool-tokens 256 --json
    """
    with command_console(as_json=as_json) as console:
        from choreo_agents.engine import Memory
        from choreo_agents.workflows.cases import CASES, DebateOptions, debate_problem
        from choreo_agents.workflows.playing import Setting, make_setup, run_method

        loaded = load(console, model, loading)
        token_bytes = loaded.adapter.geometry.bytes_per_token
        budget = Memory(kv_budget_bytes=pool_tokens * token_bytes, host_bytes=host_tokens * token_bytes, disk=disk)
        options, item = DebateOptions(rounds=3), debate_problem(seed, agents=3, reports=0)
        setup = make_setup(CASES["debate"], options, loaded, None, 0.0, 1.0, max_tokens=32)
        with console.status("running the debate ..."):
            memory_map = run_method(Setting(loaded, setup, item, seed, budget), "choreo").memory
        if as_json:
            typer.echo(json.dumps(memory_map.as_object(), indent=2))
            return
        for title, columns, rows in memory_map.tables():
            cells = [(escape(name), *("none" if n is None else f"{n:,}" for n in counts)) for name, *counts in rows]
            console.print(titled(title, columns, cells, columns[1:]))
        console.print(
            f"{memory_map.hit_rate:.0%} of the tokens that calls read or asked for were in the cache. Messages: "
            f"{memory_map.evicted} evicted from the pool, {memory_map.restored_from_host} restored from the host, "
            f"{memory_map.restored_from_disk} from disk; {memory_map.lost} dropped from the last tier, "
            f"{memory_map.recomputed} recomputed."
        )
