"""Whether the time to a first token tells one tenant what another has encoded: pairs of calls over each memory.

    make side-channel                             500 pairs for each of pool, host, disk and store
    make side-channel OPTIONS="--pairs 100"

Of each pair one text is that which another tenant has encoded just before, and which lies in the memory in question;
the other is one that nobody has. Whoever asks encodes both for the first time. Which comes first is drawn. The sign of
the difference says whether there is one, whatever the machine: by a Wilcoxon test, at 1 % for all memories together.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

import torch
from scipy.stats import wilcoxon

from choreo_agents import Engine, Memory, MessageHandle, Sampling
from torture.everything import say

PLACES = ("pool", "host", "disk", "store")
LEVEL = 0.01
_TOKENS = 96
_ONE = Sampling(max_tokens=1, stop_tokens=())


def differences(place: str, pairs: int, folder: Path, seed: int, *, own: bool = False) -> list[float]:
    """Seconds by which a first token behind a text that another tenant has encoded comes later than behind another."""
    rng = Random(f"{seed} {place}")
    memory = Memory(
        kv_budget_bytes=1 << 24,
        host_bytes=1 << 26 if place == "host" else 0,
        disk=folder / "disk" if place == "disk" else None,
        persist_dir=folder / "kept" if place == "store" else None,
    )
    found: list[float] = []
    with Engine.load("embedded", memory=memory, salt="operator") as engine:
        other = engine.tenant("other")
        asks = other if own else engine.tenant("asks")
        for number in range(pairs + 8):
            known, unknown, decoy = ([rng.randrange(10, 700) for _ in range(_TOKENS)] for _ in range(3))
            held = [other.prefill(known), other.prefill(decoy)]
            _move(other, held, place)
            took: dict[bool, float] = {}
            for is_known in rng.sample([True, False], 2):
                started = time.perf_counter()
                handle = asks.prefill(known if is_known else unknown)
                answer = asks.decode([7], [handle], sampling=_ONE)
                took[is_known] = time.perf_counter() - started
                for each in (answer, handle):
                    asks.release(each)
            for each in held:
                other.release(each)
            if number >= 8:  # the first calls of a process are not like others
                found.append(took[True] - took[False])
    return found


def _move(engine: Engine, handles: Sequence[MessageHandle], place: str) -> None:
    """Have messages in one memory."""
    if place == "store":
        engine.kv.persist(list(handles))
        engine.kv.flush()
    if place != "pool":
        engine.kv.offload(handles)
    while place == "disk" and set(engine.kv.tiers(handles)) != {"disk"}:
        time.sleep(0.001)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=500, help="for each memory (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and orders")
    parser.add_argument("--own", action="store_true", help="ask as who has encoded them: that has to tell")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    told = 0
    for place in PLACES:
        with tempfile.TemporaryDirectory() as folder:
            found = differences(place, asked.pairs, Path(folder), asked.seed, own=asked.own)
        p = float(wilcoxon(found).pvalue)
        tells = p < LEVEL / len(PLACES)
        told += tells
        verdict = "TELLS" if tells else "tells nothing"
        say(f"{place:6} {len(found)} pairs: median difference {1e6 * median(found):+.1f} us, p = {p:.3f}: {verdict}")
    return 1 if told else 0


if __name__ == "__main__":
    raise SystemExit(main())
