"""Passes whose sizes recur: each is run over the same memory as the last of its sizes, so that a GPU may replay it.

    step ── plan ── rounded sizes ── FixedPass: tables, tokens, positions ──┬── launch by launch, the first few times
                                                                           └── captured once, then replayed

A step is padded to sizes that recur, by tokens that see nothing and are written nowhere. Replayed or not, the same
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

from choreo_agents.attention.heads import HeadShape
from choreo_agents.attention.layout import Layout
from choreo_agents.attention.packing import SentTables
from choreo_agents.attention.step import AttentionBackend, StepAttention
from choreo_agents.errors import error_text
from choreo_agents.kv.pool import KVPool
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.lean.made_of import MadeOf

MOST_TOKENS = 256
"""Of a pass whose sizes recur: a longer one keeps a device busy whatever its launches cost."""
MOST_SIZES = 32
"""That are kept, the last used."""
CAPTURED_AFTER = 3
"""Runs of a pass until it is captured: that costs about as much, and sizes that nobody meets again are many."""
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Of a function: what does the same again, and where its result then is."""
_log = logging.getLogger(__name__)


class FixedPass:
    """A pass over memory that stays where it is.

    Args:
        adapter: The model.
        tables: What its attention is told, by a backend.
        wanted: Tokens whose logits it gives.
    """

    def __init__(self, adapter: ModelAdapter, tables: Any, wanted: int) -> None:
        self._adapter = adapter
        self.tables = tables
        sizes = {"tokens": tables.sizes.tokens, "positions": tables.sizes.tokens, "wanted": wanted}
        self._sent = SentTables({name: numpy.zeros(size, numpy.int64) for name, size in sizes.items()}, adapter.device)
        self._captured: tuple[Callable[[], None], Tensor] | None = None
        self._runs = 0

    @property
    def is_captured(self) -> bool:
        return self._captured is not None

    @property
    def is_due(self) -> bool:
        """Whether it has recurred often enough to be captured."""
        return self._captured is None and self._runs >= CAPTURED_AFTER

    def give_up(self) -> None:
        """Run launch by launch again: what was captured is let go."""
        self._captured = None

    @torch.inference_mode()
    def capture(self, attention: StepAttention, capture: Capture) -> None:
        """Let it be replayed from now on; raises what a model does that cannot be captured."""
        self._captured = capture(lambda: self._run(attention))

    @torch.inference_mode()
    def logits(
        self, tokens: Sequence[int] | Tensor, positions: Sequence[int], attention: StepAttention, wanted: Sequence[int]
    ) -> Tensor:
        """See `ModelAdapter.logits`; good until the next pass. Tokens may be on the device alone."""
        told = () if isinstance(tokens, Tensor) else tokens
        for name, given in (("tokens", told), ("positions", positions), ("wanted", wanted)):
            array = self._sent.host[name]
            array[: len(given)] = given
            array[len(given) :] = 0
        self._sent.send()
        if isinstance(tokens, Tensor):
            self._sent["tokens"][: len(tokens)].copy_(tokens)
        self._runs += 1
        if self._captured is not None:
            replay, logits = self._captured
            replay()
            return logits[: len(wanted)]
        return self._run(attention)[: len(wanted)]

    def _run(self, attention: StepAttention) -> Tensor:
        sent = self._sent
        return self._adapter.traced_logits(sent["tokens"], sent["positions"], attention, sent["wanted"])


class Passes:
    """All passes of an engine whose sizes recur.

    Args:
        adapter: The model.
        pool: Where KV lives.
        backend: Attends; if it knows no sizes, no pass recurs.
        capture: Captures a pass; None: none is.
    """

    def __init__(self, adapter: ModelAdapter, pool: KVPool, backend: AttentionBackend, capture: Capture | None) -> None:
        self._adapter, self._pool = adapter, pool
        self._backend: Any = backend if hasattr(backend, "plan_step") else None
        self._capture = capture
        self._passes: OrderedDict[Any, FixedPass] = OrderedDict()
        self._made_of: MadeOf | None = None
        """The model as it was when the first pass was captured."""
        self.why = "" if self._backend is not None else "the attention backend is none that can be captured"
        """Why no pass is captured, if something stands in the way."""

    @property
    def captured(self) -> int:
        """Sizes whose passes are replayed."""
        return sum(each.is_captured for each in self._passes.values())

    def find(self, layout: Layout, wanted: int) -> tuple[FixedPass, StepAttention] | None:
        """The pass for a step, told of it; None if steps like it do not recur."""
        if self._backend is None or not self._pool.keys or not 0 < len(layout.positions) <= MOST_TOKENS:
            return None
        adapter, geometry = self._adapter, self._pool.geometry
        shape = HeadShape(adapter.heads, geometry.kv_heads, geometry.head_dim)
        planned = self._backend.plan_step(layout, tuple(dict.fromkeys(adapter.kinds)), shape)
        sizes, most = planned.sizes.rounded(), _rounded(wanted)
        found = self._passes.pop((sizes, most), None)
        if found is None:
            found = FixedPass(adapter, self._backend.tables(planned, sizes), most)
        else:
            found.tables.be(planned)
        self._passes[sizes, most] = found
        if len(self._passes) > MOST_SIZES:
            self._let_go([self._passes.popitem(last=False)[1]])
        prepared = self._backend.prepare_planned(planned, found.tables)
        return found, StepAttention(layout, self._pool, self._backend, adapter.kinds, prepared=prepared)

    def logits(
        self,
        found: FixedPass,
        tokens: Sequence[int],
        positions: Sequence[int],
        attention: StepAttention,
        wanted: Sequence[int],
    ) -> Tensor:
        """Run a pass; see `ModelAdapter.logits`."""
        if found.is_due and self._capture is not None:
            self._try_to_capture(found, attention, self._capture)
        logits = found.logits(tokens, positions, attention, wanted)
        if found.is_captured and not self.are_current():
            # It is looked at while the device computes: what was captured reads weights that are the model's no more.
            self.forget(found)
            return found.logits(tokens, positions, attention, wanted)
        return logits

    def forget(self, but: FixedPass | None = None) -> None:
        """Let go of all passes, and of the memory that they take.

        Args:
            but: One that is in use: it stays known, and runs launch by launch until it is captured again.
        """
        self._let_go(self._passes.values())
        used = [(sizes, each) for sizes, each in self._passes.items() if each is but]
        self._passes = OrderedDict(used)
        self._made_of = None

    def are_current(self) -> bool:
        """Whether the model is what was captured."""
        return self._made_of is None or self._made_of.is_there()

    def _let_go(self, passes: Iterable[FixedPass]) -> None:
        captured = [each for each in passes if each.is_captured]
        if captured and self._adapter.device.type == "cuda":
            torch.cuda.synchronize(self._adapter.device)  # one of them may still be under way
        for each in captured:
            each.give_up()

    def _try_to_capture(self, found: FixedPass, attention: StepAttention, capture: Capture) -> None:
        if not self.are_current():
            self.forget(found)
        try:
            found.capture(attention, capture)
        except Exception as error:  # whatever a model does that cannot be captured
            self._capture, self.why = None, f"a pass cannot be captured: {error_text(error)}"
            _log.warning("passes run launch by launch: %s", self.why)
            return
        if self._made_of is None:
            self._made_of = MadeOf(self._adapter.model, self._adapter.model.modules())


def _rounded(wanted: int) -> int:
    """Rows of logits, in sizes that recur."""
    return max(16, 1 << (wanted - 1).bit_length()) if wanted else 1


def cuda_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs that share their memory, one after the other being replayed."""
    alive: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
    pools: list[Any] = []
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        if not alive:
            pools[:] = [torch.cuda.graph_pool_handle()]  # of one that nobody holds any more there is nothing left
        [pool] = pools
        stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                out = run()
            except Exception:
                with suppress(RuntimeError):  # says again that it came to nothing
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        alive.add(graph)
        return graph.replay, out

    return capture
