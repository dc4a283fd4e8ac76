"""A process of its own, in which a model is loaded once: it prints what that cost, as one JSON object."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

from choreo_agents.engine import Engine
from choreo_agents.engine.settings import Memory
from choreo_agents.lab.rivals.plain_load import load_plainly
from choreo_agents.models import load_model
from choreo_agents.models.embedded import WEIGHTS
from choreo_agents.sampling import Sampling
from choreo_agents.terminal.loading import DTYPES

_KV_BYTES = 1 << 22
_LOOK_S = 0.002


def anonymous_bytes() -> int:
    """Memory of this process that no file holds: what Linux calls RssAnon."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most anonymous memory while it is entered, above what there was before."""

    def __enter__(self) -> Peak:
        self._before = self._most = anonymous_bytes()
        self._done = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_S):
            self._most = max(self._most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watching.join()

    @property
    def bytes(self) -> int:
        return self._most - self._before


def main(way: str, path: Path, dtype: torch.dtype | None, threads: int, *, prepacked: bool) -> dict[str, float]:
    """Load a model as transformers does, or as the engine does, and decode a few tokens."""
    torch.set_num_threads(threads)
    load_plainly(WEIGHTS, None)
    load_model(WEIGHTS)  # all that loading imports is there now
    with Peak() as loading:
        started = time.perf_counter()
        if way == "plain":
            model = load_plainly(path, dtype)
        else:
            loaded = load_model(path, device="cpu", dtype=dtype, prepacked=prepacked)
            model = loaded.adapter.model
        seconds = time.perf_counter() - started
    weights = sum(weight.nbytes for weight in model.parameters())
    found = {"seconds": seconds, "weights": weights, "loading": loading.bytes}
    if way != "plain":
        with Peak() as decoding, Engine.load(loaded, memory=Memory(kv_budget_bytes=_KV_BYTES)) as engine:
            started = time.perf_counter()
            engine.decode("A text.", sampling=Sampling(temperature=0.0, max_tokens=4))
            found |= {"first_decode": time.perf_counter() - started}
        found |= {"decoding": max(0, decoding.bytes)}
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(  # noqa: T201
        json.dumps(
            main(
                asked["way"],
                Path(asked["path"]),
                DTYPES.get(asked["dtype"]),
                asked["threads"],
                prepacked=asked["prepacked"],
            )
        )
    )
