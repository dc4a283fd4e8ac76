"""Does what a step says: maps KV, one forward pass, and a token for every row that samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from choreo_agents.attention.backends.base import AttentionBackend
from choreo_agents.kv.copying import LayeredCopy
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.guides.masks import StepMasks
from choreo_agents.models.lora import LoraAdapter
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.drawing import lottery_on
from choreo_agents.runtime.forward import Forward
from choreo_agents.runtime.passes import Passes, cuda_capture
from choreo_agents.runtime.step import Row, Step
from choreo_agents.sampling import BatchSampler, Chosen, Sampler, choose_tokens
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.tracing import Ledger


class Executor:
    """Owns the model, the pool's tensors and the attention backend; decides nothing.

    Args:
        adapter: The model.
        pool: Where KV lives.
        backend: Attends.
        counters: Counts what is read.
        loras: Adapters by fingerprint, and `mappers` likewise; both may grow.
        graphs: Whether passes that recur may be captured, where the device can do that.
        ahead: Whether these are begun a step ahead.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        pool: KVPool,
        backend: AttentionBackend,
        counters: Ledger[Counters],
        loras: Mapping[str, LoraAdapter] | None = None,
        mappers: Mapping[str, CacheMapper] | None = None,
        *,
        graphs: bool = True,
        ahead: bool = True,
    ) -> None:
        self.adapter = adapter
        self.pool = pool
        self.backend = backend
        self.counters = counters
        self._batch = BatchSampler(lottery_on(adapter.device))
        self._masks = StepMasks(adapter.device)
        is_cuda = adapter.device.type == "cuda"
        self.passes = Passes(adapter, pool, backend, cuda_capture(adapter.device) if graphs and is_cuda else None)
        by_name = {} if loras is None else loras
        self.forward = Forward(adapter, pool, backend, counters, self.passes, by_name, ahead=ahead)
        self._mappers = {} if mappers is None else mappers

    def run(self, step: Step, samplers: Mapping[int, Sampler]) -> dict[int, Chosen]:
        """Encode the step's tokens and return each sampling request's next token.

        Args:
            step: What to run.
            samplers: By request number, for every row that samples.
        """
        with LayeredCopy(self.pool, step.arrivals) as arriving:
            return self._run(step, samplers, arriving.wait)

    def _run(self, step: Step, samplers: Mapping[int, Sampler], wait: Callable[[int], None]) -> dict[int, Chosen]:
        for row in step.mapped:
            self._map(row, wait)
        if not step.tokens:
            return {}
        numbers = [row.number for row in step.rows if row.samples]
        asked = [samplers[number] for number in numbers]
        with self._masks.filling(sampler.guide for sampler in asked):
            logits = self.forward.logits(step, wait)
        meanwhile = self.forward.meanwhile
        if meanwhile is not None:
            logits = logits.clone()  # the next pass is where this one was
        return dict(zip(numbers, choose_tokens(asked, logits, self._batch, meanwhile), strict=True))

    def answers(self) -> bool:
        """Whether the device still computes; asked after a failure."""
        if self.adapter.device.type == "cpu":
            return True
        try:
            return float(torch.ones(1, device=self.adapter.device).add_(1)) == 2.0
        except torch.OutOfMemoryError:
            return True
        except RuntimeError:
            return False

    def free_cached(self) -> None:
        """Let the device have back what torch keeps of it for later, and what recurring passes keep."""
        self.forward.forget()
        if self.adapter.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _map(self, row: Row, wait: Callable[[int], None]) -> None:
        """Fill a row's slots with what a mapper makes of the KV of its one piece."""
        mapper, [piece] = self._mappers[row.mapper], row.view
        source = self._slots(piece.segment, row.first, len(row.tokens))
        target = self._slots(row.segment, row.first, len(row.tokens))
        first = row.segment.native_offset + row.first
        positions = torch.arange(first, first + len(row.tokens), device=source.device)
        for layer, (keys, values) in enumerate(zip(self.pool.keys, self.pool.values, strict=True)):
            wait(layer)
            moved = mapper.moved(layer, keys[:, source], piece.shift)
            keys[:, target], values[:, target] = mapper.map(layer, moved, values[:, source], positions)

    def _slots(self, segment: Segment, first: int, count: int) -> Tensor:
        runs = segment.slots(first, count)
        return torch.cat([torch.arange(run.start, run.end) for run in runs]).to(self.adapter.device)
