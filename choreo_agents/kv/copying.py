"""Keys and values on their way into the pool, a layer at a time, beside the steps that read them."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents.kv.segment import Segment

BESIDE_BYTES = 1 << 20
"""What is smaller is copied at once: a thread would take longer to start."""


@dataclass(frozen=True, eq=False)
class _Copy:
    """A segment's keys and values, [layers, kv_heads, tokens, head_dim] each."""

    segment: Segment
    keys: Tensor
    values: Tensor
    begun: torch.cuda.Event | None
    """On a GPU, when it is done with what was asked of it before: earlier steps may still read the slots."""


class Copies:
    """Fills segments from the host: the first layers of all that was begun, then the second ones.

    A model attends in its first layer long before its last. Whoever reads a layer waits until all copies have that
    layer, and computes with it while later ones are copied. May be used from any thread.

    Args:
        keys: The pool's, [kv_heads, slots, head_dim] by layer; `values` likewise.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._keys, self._values = keys, values
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._queue: list[tuple[int, int, _Copy]] = []
        """Layer, number and copy of all that is not begun yet, as a heap."""
        self._now: int | None = None
        """The layer that is being copied."""
        self._left: dict[Segment, int] = {}
        """How many layers each segment waits for."""
        self._failure: BaseException | None = None
        device = keys[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, segment: Segment, keys: Tensor, values: Tensor) -> None:
        """Copy all layers into a segment's slots, from now on.

        Args:
            segment: Of as many encoded tokens.
            keys: [layers, kv_heads, tokens, head_dim], of the pool's type; `values` likewise.
        """
        begun = None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()
        copy = _Copy(segment, keys, values, begun)
        layers = range(len(self._keys))
        if keys.nbytes + values.nbytes < BESIDE_BYTES:
            for layer in layers:
                self._fill(copy, layer)
            return
        with self._changed:
            idle = not self._left
            self._left[segment] = len(layers)
            for layer in layers:
                heapq.heappush(self._queue, (layer, next(self._order), copy))
            if idle:
                threading.Thread(target=self._work, name="choreo-copy").start()

    def settle(self, layer: int) -> None:
        """Wait until all that was begun is there up to a layer.

        Raises:
            RuntimeError: Something could not be copied.
        """
        if self._left or self._failure is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._settled(layer))
                self._require_no_failure()

    def finish(self, segment: Segment) -> None:
        """Wait until nothing is copied into a segment any more."""
        if segment in self._left:
            with self._changed:
                self._changed.wait_for(lambda: segment not in self._left)

    def finish_all(self) -> None:
        """Wait until nothing is copied any more; raises what `settle` raises."""
        self.settle(len(self._keys) - 1)

    def close(self) -> None:
        """Wait until nothing is copied any more, whether that went well or not."""
        with suppress(RuntimeError):
            self.finish_all()

    def _settled(self, layer: int) -> bool:
        later = not self._queue or self._queue[0][0] > layer
        return later and (self._now is None or self._now > layer)

    def _require_no_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("keys and values could not be copied into the KV memory") from self._failure

    def _work(self) -> None:
        """Copy until nothing is left."""
        copy: _Copy | None = None
        while True:
            with self._changed:
                if copy is not None:
                    self._copied(copy)
                if not self._queue:
                    return
                layer, _, copy = heapq.heappop(self._queue)
                self._now = layer
            try:
                self._fill(copy, layer)
            except BaseException as error:
                with self._changed:
                    self._failure = error
                    self._queue.clear()
                    self._left.clear()
                    self._now = None
                    self._changed.notify_all()
                return

    def _copied(self, copy: _Copy) -> None:
        """Take note that a layer is there."""
        self._now = None
        self._left[copy.segment] -= 1
        if not self._left[copy.segment]:
            del self._left[copy.segment]
        self._changed.notify_all()

    @torch.inference_mode()
    def _fill(self, copy: _Copy, layer: int) -> None:
        """Copy one layer, stretch by stretch."""
        if self._stream is not None and copy.begun is not None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(copy.begun)
                self._move(copy, layer)
            self._stream.synchronize()
        else:
            self._move(copy, layer)

    def _move(self, copy: _Copy, layer: int) -> None:
        at = 0
        for run in copy.segment.slots(0, copy.keys.shape[2]):
            for side, part in ((self._keys, copy.keys), (self._values, copy.values)):
                side[layer][:, run.start : run.end].copy_(part[layer][:, at : at + run.length])
            at += run.length
