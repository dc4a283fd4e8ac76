"""Two actors beside one engine on independent debates, and when copying KV is quicker than encoding it again.

    python load/scale_out.py [--model PATH] [--debates 32] [--repeats 9] [--json FILE] [--plot FILE.png]

One engine of one thread, one of two, and two actors of one thread each hold debates in turns, one repeat after the
other: every debate is a graph of its own, all begin at once, and how much each says is fixed. Then KV of messages is
copied from one actor to the other, and encoded there again, length by length: where the lines cross, a call that reads
a message is better off with the copy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from choreo_ray import RayEngine
from choreo_ray.remote.routing import CallToPlace, EngineAhead, Route

from choreo_agents import Engine, Memory, RunOptions, Sampling
from choreo_agents.tracing import EventList, KVCopied
from choreo_agents.workflows import debate

_SPEAKERS = ("alice", "bruno", "carla")
_ROUNDS, _TOKENS = 2, 48
_LENGTHS = (32, 64, 128, 256, 512, 1024, 1792)


@dataclass(frozen=True)
class Held:
    """What holding all debates once took."""

    took_s: float
    tokens: int
    """Said."""
    encoded: int
    again: int
    """Tokens that were encoded again."""
    copied_bytes: int


class _Says(Mapping[tuple[str, int, int, int], tuple[int, ...]]):
    """What everybody says in a debate: as many tokens, other ones each time."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._seed, self._vocabulary = seed, vocabulary

    def __getitem__(self, call: tuple[str, int, int, int]) -> tuple[int, ...]:
        drawn = random.Random(f"{self._seed} {call}")
        return tuple(drawn.randrange(20, self._vocabulary) for _ in range(_TOKENS))

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


async def held(engine: Engine, debates: int, events: EventList | None) -> Held:
    """Hold so many debates at once, each of which has nothing in common with the others."""
    size, before = engine.model.adapter.vocabulary_size, engine.stats()
    if events is not None:
        events.events.clear()
    sampling = Sampling(max_tokens=_TOKENS, stop_tokens=())
    runs = []
    for _ in range(debates):
        seed = secrets.randbits(32)
        graph = debate({name: f"Notes {seed} of {name}." for name in _SPEAKERS}, rounds=_ROUNDS, sampling=sampling)
        options: Any = {"configurable": {"choreo": RunOptions(replay=_Says(seed, size))}}
        runs.append(graph.compile(engine=engine).ainvoke({"messages": [("user", f"Question {seed}?")]}, options))
    began = time.perf_counter()
    with engine.scope():
        await asyncio.gather(*runs)
    took_s = time.perf_counter() - began
    after, told = engine.stats(), [] if events is None else events.events
    return Held(
        took_s,
        debates * len(_SPEAKERS) * _ROUNDS * _TOKENS,
        after.tokens_encoded - before.tokens_encoded,
        after.tokens_recomputed - before.tokens_recomputed,
        sum(event.bytes for event in told if isinstance(event, KVCopied)),
    )


def copied_and_encoded(model: str, repeats: int) -> list[dict[str, float]]:
    """Seconds to copy messages of several lengths between two actors, and to encode them again, and their bytes."""
    found: list[dict[str, float]] = []
    events, size = EventList(), 0
    where = {"copies": True}

    def forced(call: CallToPlace, engines: Sequence[EngineAhead]) -> Route:
        if not call.reads:
            return Route("engine-0", {}, (), 0, 0, 0.0)
        nbytes = sum(read.nbytes for read in call.reads)
        ids = [read.id for read in call.reads]
        if where["copies"]:
            return Route("engine-1", dict.fromkeys(ids, "engine-0"), (), nbytes, 0, 0.0)
        return Route("engine-1", {}, tuple(ids), 0, 0, 0.0)

    with RayEngine.load(model, engines=2, sink=events, memory=Memory(kv_budget_bytes=1 << 29)) as router:
        core: Any = router._core
        core.execution.fleet._route = forced  # by itself it would choose what is quicker
        size = router.model.adapter.vocabulary_size
        for length in (each for each in _LENGTHS if each < router.model.adapter.max_positions - 64):
            took: dict[bool, list[float]] = {True: [], False: []}
            nbytes = 0
            for number in range(2 * (repeats + 1)):
                where["copies"] = number % 2 == 0
                events.events.clear()
                trunk = router.prefill([random.randrange(20, size) for _ in range(length)])
                began = time.perf_counter()
                reader = router.prefill([random.randrange(20, size)], [trunk])
                if number > 1:  # the first of each prepares what the others use
                    took[where["copies"]].append(time.perf_counter() - began)
                nbytes = sum(event.bytes for event in events.events if isinstance(event, KVCopied)) or nbytes
                router.release(reader)
                router.release(trunk)
            copied_s, encoded_s = (statistics.median(took[copies]) for copies in (True, False))
            found.append({"tokens": length, "bytes": nbytes, "copied_s": copied_s, "encoded_s": encoded_s})
    return found


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--debates", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    events, memory = EventList(), Memory(kv_budget_bytes=1 << 29)
    taken: dict[str, list[Held]] = {"one, 1 thread": [], "one, 2 threads": [], "two actors": []}
    with (
        Engine.load(asked.model, memory=memory) as alone,
        RayEngine.load(asked.model, engines=2, memory=memory, sink=events) as router,
    ):
        for repeat in range(asked.repeats + 1):
            for name, made in taken.items():
                torch.set_num_threads(2 if "2 threads" in name else 1)
                two = name == "two actors"
                result = asyncio.run(held(router if two else alone, asked.debates, events if two else None))
                if repeat:  # the first warms up
                    made.append(result)
    torch.set_num_threads(1)
    rates = {name: [each.tokens / each.took_s for each in made] for name, made in taken.items()}
    print(f"{asked.debates} debates of {len(_SPEAKERS)}, {_ROUNDS} rounds, {_TOKENS} tokens; {asked.repeats} repeats")
    for name, found in rates.items():
        middle = statistics.median(found)
        ratio = statistics.median(one / two for one, two in zip(found, rates["one, 1 thread"], strict=True))
        print(f"  {name:16}{middle:9.0f} tokens/s  ({min(found):.0f} to {max(found):.0f})   {ratio:5.2f}x")
    last = taken["two actors"]
    print(
        f"  two actors encoded again {statistics.median(each.again for each in last):.0f} tokens of {last[0].encoded}, "
    )
    print(f"  and copied {statistics.median(each.copied_bytes for each in last):.0f} bytes (medians)")
    pairs = copied_and_encoded(asked.model, asked.repeats)
    print("  tokens      bytes    copied   encoded again")
    for pair in pairs:
        copied_ms, encoded_ms = 1e3 * pair["copied_s"], 1e3 * pair["encoded_s"]
        print(f"  {pair['tokens']:6}{pair['bytes']:11}{copied_ms:8.1f} ms{encoded_ms:8.1f} ms")
    if asked.json:
        rows = {name: [asdict(each) for each in made] for name, made in taken.items()}
        asked.json.write_text(json.dumps({"debates": rows, "break_even": pairs}))
    if asked.plot:
        drawn(pairs, asked.plot)


def drawn(pairs: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw the break-even."""
    import matplotlib  # noqa: PLC0415 - of the plot alone

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    tokens = [pair["tokens"] for pair in pairs]
    axes.plot(tokens, [1e3 * pair["copied_s"] for pair in pairs], marker="o", label="copied from the other actor")
    axes.plot(tokens, [1e3 * pair["encoded_s"] for pair in pairs], marker="s", label="encoded again")
    axes.set(xscale="log", yscale="log", xlabel="tokens of the message", ylabel="ms until a reader has read it")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
