"""Keys and values that come back to the pool a layer at a time, while a step computes with those that are there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import HostKV

BESIDE_BYTES = 1 << 20
"""What is smaller is copied at once: a thread would take longer to start."""


@dataclass(eq=False)
class Arrival:
    """A message that the next step brings into its segment."""

    segment: Segment
    kv: HostKV | None
    """None once they are there."""
    from_disk: bool = False
    is_there: bool = False
    """Whether all of it is; looked at once it is over."""
    over: threading.Event = field(default_factory=threading.Event)
    """Whether it is there, or was withdrawn."""

    def end(self, *, is_there: bool) -> None:
        """Nothing more is written."""
        if is_there:
            self.is_there, self.kv = True, None
        self.over.set()


class LayeredCopy:
    """Copies arrivals of one step, first of all of them the first layer, then the second, ...

    A model attends in its first layer long before its last: the step waits for each layer as it comes to it, and
    computes with it while later ones are copied. `with` ends when nothing is copied any more.

    Args:
        pool: Gets them.
        arrivals: Of the step.
    """

    def __init__(self, pool: KVPool, arrivals: Sequence[Arrival]) -> None:
        self._pool, self._arrivals = pool, arrivals
        self._changed = threading.Condition()
        self._layers = 0
        """That are there."""
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        device = pool.keys[0].device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and arrivals:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Steps before this one may still read the slots.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def wait(self, layer: int) -> None:
        """Return when a layer and those before it are there.

        Raises:
            RuntimeError: It could not be copied.
        """
        if self._layers <= layer and self._arrivals:
            with self._changed:
                self._changed.wait_for(lambda: self._layers > layer or self._failure is not None)
                self._require_none_failed()

    def __enter__(self) -> Self:
        if self._arrivals:
            beside = sum(kv.nbytes for _, kv in self._coming()) >= BESIDE_BYTES
            if not (beside and self._begun()):
                self._copy()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._thread is not None:
            self._thread.join()
        if error is None:
            self._require_none_failed()

    def _coming(self) -> list[tuple[Segment, HostKV]]:
        return [(each.segment, each.kv) for each in self._arrivals if each.kv is not None]

    def _begun(self) -> bool:
        """Whether there was a thread to be had."""
        self._thread = threading.Thread(target=self._copy, name="choreo-copy", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
        return self._thread is not None

    def _require_none_failed(self) -> None:
        if self._failure is not None:
            raise RuntimeError("keys and values could not be copied into the KV memory") from self._failure

    @torch.inference_mode()
    def _copy(self) -> None:
        try:
            with torch.cuda.stream(self._stream):
                for layer in range(self._pool.geometry.layers):
                    for segment, kv in self._coming():
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
            return  # whoever asked for them withdraws them
        for arrival in self._arrivals:
            arrival.end(is_there=True)
