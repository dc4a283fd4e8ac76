"""Does what a step says: one forward pass, and a token for every row that samples."""

from __future__ import annotations

from collections.abc import Mapping

from choreo_agents.attention.backends.base import AttentionBackend
from choreo_agents.attention.step import StepAttention
from choreo_agents.kv.pool import KVPool
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.step import Step
from choreo_agents.sampling import Chosen, TokenSampler


class Executor:
    """Owns the model, the pool's tensors and the attention backend; decides nothing."""

    def __init__(self, adapter: ModelAdapter, pool: KVPool, backend: AttentionBackend, counters: Counters) -> None:
        self.adapter = adapter
        self.pool = pool
        self.backend = backend
        self.counters = counters

    def run(self, step: Step, samplers: Mapping[int, TokenSampler]) -> dict[int, Chosen]:
        """Encode the step's tokens and return each sampling request's next token.

        Args:
            step: What to run.
            samplers: By request number, for every row that samples.
        """
        attention = StepAttention(step.layout, self.pool, self.backend, self.adapter.kinds)
        shared, alone = attention.kv_bytes_read()
        self.counters.kv_bytes_read += shared
        self.counters.kv_bytes_read_alone += alone
        logits = self.adapter.logits(step.tokens, step.layout.positions, attention, step.wanted)
        numbers = [row.number for row in step.rows if row.samples]
        return {number: samplers[number].choose(logits[i]) for i, number in enumerate(numbers)}
