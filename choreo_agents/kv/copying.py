"""Layer-by-layer copies of KV back into the pool, beside a step that computes with the layers already copied."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import torch

from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import HostKV

BESIDE_BYTES = 1 << 20
"""Bytes below which KV is copied at once, since a thread would take longer to start."""


@dataclass(eq=False)
class Arrival:
    """A copy of a message into its segment, for the next step."""

    segment: Segment
    kv: HostKV | None
    """Keys and values; None once they are copied."""
    from_disk: bool = False
    is_there: bool = False
    """Whether all of it was copied; valid once `over` is set."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when it is copied or withdrawn."""

    def end(self, *, is_there: bool) -> None:
        """Mark the copy as over."""
        if is_there:
            self.is_there, self.kv = True, None
        self.over.set()


class LayeredCopy:
    """Copies of a step's arrivals: the first layer of all of them, then the second, and so on.

    A model attends in its first layer long before its last. The step waits for each layer when it gets there, and
    computes while later layers are copied. Leaving the `with` block waits for the last copy.

    Args:
        pool: Receives the KV.
        arrivals: Of the step.
    """

    def __init__(self, pool: KVPool, arrivals: Sequence[Arrival]) -> None:
        self._pool, self._arrivals = pool, arrivals
        self._changed = threading.Condition()
        self._layers = 0
        """Number of layers that are copied."""
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        device = pool.keys[0].device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and arrivals:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Steps before this one may still read the slots.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def wait(self, layer: int) -> None:
        """Wait until a layer and those before it are copied.

        Raises:
            RuntimeError: A copy failed.
        """
        # Read without the lock: it only grows, so that an old value merely takes the slow path.
        if self._layers <= layer and self._arrivals:
            with self._changed:
                self._changed.wait_for(lambda: self._layers > layer or self._failure is not None)
                self._raise_failure()

    def __enter__(self) -> Self:
        if not self._arrivals:
            return self
        if sum(kv.nbytes for _, kv in self._pending()) >= BESIDE_BYTES:
            thread = threading.Thread(target=self._copy, name="choreo-copy", daemon=True)
            with suppress(RuntimeError):  # the system has no thread left
                thread.start()
                self._thread = thread
        if self._thread is None:
            self._copy()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._thread is not None:
            self._thread.join()
        if error is None:
            self._raise_failure()

    def _pending(self) -> list[tuple[Segment, HostKV]]:
        return [(arrival.segment, arrival.kv) for arrival in self._arrivals if arrival.kv is not None]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("keys and values could not be copied into the KV memory") from self._failure

    @torch.inference_mode()
    def _copy(self) -> None:
        try:
            with torch.cuda.stream(self._stream):
                for layer in range(self._pool.geometry.layers):
                    for segment, kv in self._pending():
                        self._pool.fill(segment, kv, layer)
                    if self._stream is not None:
                        self._stream.synchronize()
                    with self._changed:
                        self._layers = layer + 1
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            return  # the step's caller withdraws the arrivals
        for arrival in self._arrivals:
            arrival.end(is_there=True)
