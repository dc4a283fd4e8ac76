"""Passes whose sizes recur run over the same memory each time, so that a GPU can capture and replay them.

    step ── plan ── rounded sizes ── FixedPass: tables, tokens, positions ──┬── launch by launch, the first few times
                                                                           └── captured once, then replayed

A step is padded to recurring sizes with tokens that see nothing and are written nowhere. Replayed or not, the same
kernels compute the same numbers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import numpy
import torch
from torch import Tensor

from choreo_agents.attention.kind import HeadShape
from choreo_agents.attention.layout import Layout
from choreo_agents.attention.packing import SentTables
from choreo_agents.attention.step import AttentionBackend, StepAttention
from choreo_agents.errors import error_text
from choreo_agents.kv.pool import KVPool
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.lean.made_of import ModelSnapshot

MOST_TOKENS = 256
"""Most tokens of a recurring pass: a longer one keeps a device busy whatever its launches cost."""
MOST_SIZES = 32
"""Most sizes kept, the last used."""
CAPTURED_AFTER = 3
"""Runs of a pass before it is captured: capturing costs about as much, and many sizes never recur."""
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Captures a function: returns a callable that replays it, and the tensor that then holds its result."""
_log = logging.getLogger(__name__)


class FixedPass:
    """A pass over memory at fixed addresses.

    Args:
        adapter: The model.
        tables: Attention tables of a backend.
        logit_count: Number of tokens whose logits it computes.
    """

    def __init__(self, adapter: ModelAdapter, tables: Any, logit_count: int) -> None:
        self._adapter = adapter
        self.tables = tables
        self.attention: StepAttention | None = None
        """Attention of the step that the tables hold."""
        sizes = {"tokens": tables.sizes.tokens, "positions": tables.sizes.tokens, "wanted": logit_count}
        self._sent = SentTables({name: numpy.zeros(size, numpy.int64) for name, size in sizes.items()}, adapter.device)
        self.captured: tuple[Callable[[], None], Tensor] | None = None
        """Replays the captured pass, and its logits; None: it runs launch by launch."""
        self.runs = 0

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture the pass for replay; raises the model's error if it cannot be captured."""
        attention = self.attention
        self.captured = capture(lambda: self._run(attention))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int] | Tensor, positions: Sequence[int], indices: Sequence[int]) -> Tensor:
        """Return logits, see `ModelAdapter.logits`; valid until the next pass. Tokens may be on the device alone."""
        host_tokens = () if isinstance(tokens, Tensor) else tokens
        for name, values in (("tokens", host_tokens), ("positions", positions), ("wanted", indices)):
            array = self._sent.host[name]
            array[: len(values)] = values
            array[len(values) :] = 0
        self._sent.send()
        if isinstance(tokens, Tensor):
            self._sent["tokens"][: len(tokens)].copy_(tokens)
        self.runs += 1
        if self.captured is not None:
            replay, logits = self.captured
            replay()
            return logits[: len(indices)]
        return self._run(self.attention)[: len(indices)]

    def _run(self, attention: StepAttention | None) -> Tensor:
        sent = self._sent
        assert attention is not None
        return self._adapter.traced_logits(sent["tokens"], sent["positions"], attention, sent["wanted"])


class Passes:
    """Recurring passes of an engine, by their sizes.

    Args:
        adapter: The model.
        pool: Pool that holds KV.
        backend: Attention backend; if it has no `plan_step`, no pass recurs.
        capture: Captures a pass; None: none is captured.
    """

    def __init__(self, adapter: ModelAdapter, pool: KVPool, backend: AttentionBackend, capture: Capture | None) -> None:
        self._adapter, self._pool = adapter, pool
        self._backend: Any = backend if hasattr(backend, "plan_step") else None
        self._capture = capture
        self._passes: OrderedDict[Any, FixedPass] = OrderedDict()
        self._made_of: ModelSnapshot | None = None
        """The model's weights and modules when the first pass was captured."""
        self.why = "" if self._backend is not None else "the attention backend does not support CUDA graphs"
        """Why no pass is captured, if none can be."""

    @property
    def captured(self) -> int:
        """Number of sizes whose passes are replayed."""
        return sum(fixed_pass.captured is not None for fixed_pass in self._passes.values())

    def find(self, layout: Layout, logit_count: int) -> FixedPass | None:
        """Return the pass for a step, with its attention, or None if steps like it do not recur."""
        if self._backend is None or not self._pool.keys or not 0 < len(layout.positions) <= MOST_TOKENS:
            return None
        adapter, geometry = self._adapter, self._pool.geometry
        shape = HeadShape(adapter.heads, geometry.kv_heads, geometry.head_dim)
        planned = self._backend.plan_step(layout, tuple(dict.fromkeys(adapter.kinds)), shape)
        sizes, count = planned.sizes.rounded(), _rounded(logit_count)
        fixed_pass = self._passes.pop((sizes, count), None)
        if fixed_pass is None:
            fixed_pass = FixedPass(adapter, self._backend.tables(planned, sizes), count)
        else:
            fixed_pass.tables.be(planned)
        self._passes[sizes, count] = fixed_pass
        if len(self._passes) > MOST_SIZES:
            self._release([self._passes.popitem(last=False)[1]])
        prepared = self._backend.prepare_planned(planned, fixed_pass.tables)
        fixed_pass.attention = StepAttention(layout, self._pool, self._backend, adapter.kinds, prepared=prepared)
        return fixed_pass

    def logits(
        self, fixed_pass: FixedPass, tokens: Sequence[int], positions: Sequence[int], indices: Sequence[int]
    ) -> Tensor:
        """Run a pass; see `ModelAdapter.logits`."""
        if self._capture is not None and fixed_pass.captured is None and fixed_pass.runs >= CAPTURED_AFTER:
            self._try_to_capture(fixed_pass, self._capture)
        logits = fixed_pass.logits(tokens, positions, indices)
        if fixed_pass.captured is not None and not self.are_current():
            # Checked while the device computes: the captured graph may read weights that have been replaced since.
            self.forget(fixed_pass)
            return fixed_pass.logits(tokens, positions, indices)
        return logits

    def forget(self, in_use: FixedPass | None = None) -> None:
        """Drop all passes and their memory.

        Args:
            in_use: Pass that is kept, and runs launch by launch until it is captured again.
        """
        self._release(self._passes.values())
        used = [(sizes, fixed_pass) for sizes, fixed_pass in self._passes.items() if fixed_pass is in_use]
        self._passes = OrderedDict(used)
        self._made_of = None

    def are_current(self) -> bool:
        """Return whether the model is still the one that was captured."""
        return self._made_of is None or self._made_of.is_current()

    def _release(self, passes: Iterable[FixedPass]) -> None:
        captured = [fixed_pass for fixed_pass in passes if fixed_pass.captured is not None]
        if captured and self._adapter.device.type == "cuda":
            torch.cuda.synchronize(self._adapter.device)  # one of them may still be running
        for fixed_pass in captured:
            fixed_pass.captured = None

    def _try_to_capture(self, fixed_pass: FixedPass, capture: Capture) -> None:
        if not self.are_current():
            self.forget(fixed_pass)
        try:
            fixed_pass.capture(capture)
        except Exception as error:  # a model may fail in any way when it is captured
            self._capture, self.why = None, f"cannot capture a CUDA graph: {error_text(error)}"
            _log.warning("passes run kernel by kernel: %s", self.why)
            return
        if self._made_of is None:
            self._made_of = ModelSnapshot(self._adapter.model)


def _rounded(count: int) -> int:
    """Return a number of logits rounded up to a size that recurs."""
    return max(16, 1 << (count - 1).bit_length()) if count else 1


def cuda_capture(device: torch.device) -> Capture:
    """Return a function that captures CUDA graphs, which share one memory pool since they are replayed one after the
    other."""
    alive: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
    pools: list[Any] = []
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        if not alive:
            pools[:] = [torch.cuda.graph_pool_handle()]  # a pool whose graphs are all gone cannot be used again
        [pool] = pools
        stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                out = run()
            except Exception:
                with suppress(RuntimeError):  # reports the same failure again
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        alive.add(graph)
        return graph.replay, out

    return capture
