"""Does what a step says: maps KV, one forward pass, and a token for every row that samples."""

from __future__ import annotations

import ctypes
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
from choreo_agents.native.library import Kernels, found, parallel
from choreo_agents.native.structs import DrawingStruct
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.forward import Forward
from choreo_agents.runtime.passes import Passes, cuda_capture
from choreo_agents.runtime.step import Row, Step
from choreo_agents.sampling import BatchSampler, Chosen, Lottery, Sampler, choose_tokens
from choreo_agents.sampling.lottery import CONSTANTS
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
        loras: Mapping[str, LoraAdapter],
        mappers: Mapping[str, CacheMapper],
        *,
        graphs: bool,
        ahead: bool,
    ) -> None:
        self.adapter = adapter
        self.pool = pool
        self.backend = backend
        self.counters = counters
        self._batch = BatchSampler(lottery_on(adapter.device))
        self._masks = StepMasks(adapter.device)
        is_cuda = adapter.device.type == "cuda"
        self.passes = Passes(adapter, pool, backend, cuda_capture(adapter.device) if graphs and is_cuda else None)
        self.forward = Forward(adapter, pool, backend, counters, self.passes, loras, ahead=ahead)
        self._mappers = mappers

    def run(self, step: Step, samplers: Mapping[int, Sampler]) -> dict[int, Chosen]:
        """Encode the step's tokens and return each sampling request's next token.

        Args:
            step: What to run.
            samplers: By request number, for every row that samples.
        """
        with LayeredCopy(self.pool, step.arrivals) as arriving:
            for row in step.mapped:
                self._map(row, arriving.wait)
            if not step.tokens:
                return {}
            numbers = [row.number for row in step.rows if row.samples]
            asked = [samplers[number] for number in numbers]
            with self._masks.filling(sampler.guide for sampler in asked):
                logits = self.forward.logits(step, arriving.wait)
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


def lottery_on(device: torch.device) -> Lottery | None:
    """That of a device: kernels in Triton on a GPU, those in C on a CPU; None if there are none."""
    made, kernels = Lottery.on(device), found()
    if made is not None or device.type != "cpu" or isinstance(kernels, str):
        return made
    return native_lottery(kernels[0])


def native_lottery(kernels: Kernels) -> Lottery:
    """That of the kernels in C, for logits in fp32."""

    def launch(logits: Tensor, asked: Tensor, told: Tensor) -> None:
        drawing = DrawingStruct(
            logits=logits.data_ptr(),
            asked=asked.data_ptr(),
            told=told.data_ptr(),
            row=logits.stride(0),
            draws=len(asked),
            words=logits.shape[1],
            threads=torch.get_num_threads(),
            margin=CONSTANTS["MARGIN"],
            lost=CONSTANTS["LOST"],
            alike=CONSTANTS["ALIKE"],
            least=CONSTANTS["LEAST"],
            lowest=CONSTANTS["LOWEST"],
            highest=CONSTANTS["HIGHEST"],
            parallel=parallel(),
        )
        kernels.draw(ctypes.addressof(drawing))

    return Lottery(launch, (torch.float32,))
