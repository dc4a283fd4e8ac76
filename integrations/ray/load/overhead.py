"""What it costs that calls cross to an actor: milliseconds a call and a token beside the same engine in this process.

    python overhead.py [--model PATH] [--rounds 7] [--calls 60] [--tokens 200] [--json FILE]

Medians of alternating rounds on one machine: `engine` is in this process, `router` has one in this process compute for
it, and `ray` has one in an actor. What crossing costs is the last line; Ray's part of it, at its best, is what a method
takes that does nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any

import ray
import torch
from choreo_ray import RayEngine
from choreo_ray.remote import EngineWorker, remote_engine

from choreo_agents import Engine, MessageHandle, Sampling

_NUMBERS = count()


def call_ms(engine: Engine, calls: int) -> float:
    """Milliseconds of a prefill of a few tokens, the median."""
    taken = []
    for _ in range(calls):
        words = f"Alice: note {next(_NUMBERS)}."
        began = time.perf_counter()
        handle = engine.prefill(words)
        taken.append(time.perf_counter() - began)
        engine.release(handle)
    return 1e3 * statistics.median(taken)


def stream_ms(engine: Engine, tokens: int) -> tuple[float, float]:
    """Milliseconds to the first token of a stream, and of each further one."""
    said = [5 + number % 7 for number in range(tokens)]
    sampling = Sampling(max_tokens=tokens, forced_token_ids=said)
    began = time.perf_counter()
    first = last = 0.0
    handle: MessageHandle | None = None
    for piece in engine.stream(f"Bob {next(_NUMBERS)}:", sampling=sampling):
        last = time.perf_counter()
        first = first or last
        if isinstance(piece, MessageHandle):
            handle = piece
    assert handle is not None
    engine.release(handle)
    return 1e3 * (first - began), 1e3 * (last - first) / (tokens - 1)


def nothing_ms(actor: Any, calls: int) -> float:
    """Milliseconds of a method that does nothing, asked again and again, the median."""
    taken = []
    for _ in range(calls):
        began = time.perf_counter()
        ray.get(actor.there.remote())
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def measured(engines: dict[str, Engine], rounds: int, calls: int, tokens: int) -> dict[str, dict[str, float]]:
    """Medians over rounds, by engine and by what was measured."""
    found: dict[str, dict[str, list[float]]] = {name: {"call": [], "first": [], "token": []} for name in engines}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            call, (first, token) = call_ms(engine, calls), stream_ms(engine, tokens)
            if number:  # the first warms up
                for what, value in (("call", call), ("first", first), ("token", token)):
                    found[name][what].append(value)
    return {name: {what: statistics.median(values) for what, values in each.items()} for name, each in found.items()}


def main() -> None:
    """Measure, and print a line for each engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with (
        Engine.load(asked.model) as engine,
        Engine.load(asked.model) as far,
        remote_engine([EngineWorker(far, "here")], far.model) as router,
        RayEngine.load(asked.model, engines=1) as crossed,
    ):
        engines: dict[str, Engine] = {"engine": engine, "front": router, "ray": crossed}
        found = measured(engines, asked.rounds, asked.calls, asked.tokens)
        assert crossed._actors is not None
        nothing = nothing_ms(crossed._actors.clients[0].actor, asked.calls)
    print(f"{'':8}{'a call':>10}{'1st token':>12}{'a token':>10}   ms")
    for name, values in found.items():
        print(f"{name:8}{values['call']:10.2f}{values['first']:12.2f}{values['token']:10.2f}")
    print(f"an actor's method that does nothing: {nothing:.2f} ms")
    over = {what: found["ray"][what] - found["engine"][what] for what in found["ray"]}
    print(f"{'over':8}{over['call']:10.2f}{over['first']:12.2f}{over['token']:10.2f}")
    if asked.json:
        asked.json.write_text(json.dumps(found | {"over": over, "nothing": nothing}))


if __name__ == "__main__":
    main()
