"""A differentiable forward pass over whole workflows, which computes at once what the engine computes step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from choreo_agents.errors import TrainingError
from choreo_agents.models.checkpointing import checkpointing
from choreo_agents.models.hook import pass_context
from choreo_agents.models.loader import LoadedModel
from choreo_agents.models.lora import Adapted, LoraAdapter
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.training.packed import PackedAttention, PackedTraces
from choreo_agents.training.trace import Trace, batched


@dataclass(frozen=True)
class LearntLogits:
    """Logits that predict each learnt token, in the order of traces and messages."""

    logits: Tensor
    """[learnt tokens, vocabulary]."""
    targets: Tensor
    """[learnt tokens], the tokens."""
    owners: Tensor
    """[learnt tokens], index of each one's trace."""


@dataclass(frozen=True)
class TraceLosses:
    """Log-losses by trace."""

    sums: Tensor
    """[traces], sum over the learnt tokens, in nats."""
    counts: Tensor
    """[traces], number of learnt tokens."""

    @property
    def mean(self) -> Tensor:
        """Mean log-loss per learnt token of all traces, in nats."""
        return self.sums.sum() / self.counts.sum()


class TraceForward:
    """Forward pass of a model over traces; gradients flow through every prefill and decode.

    Args:
        model: In eval mode. Its weights learn only if they require gradients, which `load_model` turns off.
        adapters: Adapters by their names in traces; their layers must be hooked (see `hook_layers`).
        mapper: Computes the KV of mapped messages.
        checkpointed: Recompute layers in the backward pass instead of keeping their activations. Nothing else may run
            the model meanwhile.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        adapters: Mapping[str, LoraAdapter] | None = None,
        mapper: CacheMapper | None = None,
        checkpointed: bool = False,
    ) -> None:
        self.model, self.mapper, self.checkpointed = model, mapper, checkpointed
        self.adapters = dict(adapters or {})

    def losses(self, traces: Sequence[Trace]) -> TraceLosses:
        """Return the log-losses of the traces' learnt tokens.

        Raises:
            TrainingError: As for `logits`.
        """
        learnt = self.logits(traces)
        wide = learnt.logits.to(torch.promote_types(learnt.logits.dtype, torch.float32))
        losses = functional.cross_entropy(wide, learnt.targets, reduction="none")
        sums = losses.new_zeros(len(traces)).index_add(0, learnt.owners, losses)
        return TraceLosses(sums, torch.bincount(learnt.owners, minlength=len(traces)))

    @torch.no_grad()
    def mean_loss(self, traces: Sequence[Trace], batch_tokens: int) -> float:
        """Return the mean log-loss of traces in nats per learnt token, without dropout.

        Args:
            traces: The traces.
            batch_tokens: Most tokens of one pass.
        """
        adapters = {name: replace(adapter, dropout=0.0) for name, adapter in self.adapters.items()}
        forward = TraceForward(self.model, adapters=adapters, mapper=self.mapper)
        losses = [forward.losses(batch) for batch in batched(traces, batch_tokens)]
        return float(sum(loss.sums.sum() for loss in losses) / sum(loss.counts.sum() for loss in losses))

    def logits(self, traces: Sequence[Trace]) -> LearntLogits:
        """Return the logits that predict the learnt tokens.

        Raises:
            TrainingError: There is no trace, one exceeds the model's context, or one needs an adapter, a mapper or a
                token that does not exist.
        """
        self._require_fit(traces)
        packed = PackedTraces.of(traces)
        adapter, device = self.model.adapter, self.model.adapter.device
        attention = PackedAttention(packed, adapter.kinds, device, self.mapper)
        adapted = self._adapters_of(packed)
        tokens, positions, predictors, targets, owners = (
            torch.tensor(part, dtype=torch.long, device=device)
            for part in (packed.tokens, packed.positions, packed.predictors, packed.targets, packed.owners)
        )

        again = partial(pass_context, attention, adapted)
        random = any(lora.dropout for lora, _ in adapted)
        with checkpointing(adapter.model, again, random=random) if self.checkpointed else nullcontext():
            logits = adapter.traced_logits(tokens, positions, attention, predictors, adapted)
        return LearntLogits(logits, targets, owners)

    def _adapters_of(self, packed: PackedTraces) -> list[Adapted]:
        adapted: list[Adapted] = []
        for name, rows in packed.rows_of_adapters.items():
            everything = len(rows) == len(packed.tokens)
            served = None if everything else torch.tensor(rows, device=self.model.adapter.device)
            adapted.append((self.adapters[name], served))
        return adapted

    def _require_fit(self, traces: Sequence[Trace]) -> None:
        """Raise `TrainingError` unless the model, the adapters and the mapper are those that the traces need."""
        if not traces:
            raise TrainingError("there is no trace to run: pass at least one")
        adapter = self.model.adapter
        for trace in traces:
            if trace.reach > adapter.max_positions:
                raise TrainingError(
                    f"trace {trace.id!r} reaches position {trace.reach}, but the model's context is "
                    f"{adapter.max_positions}: leave it out"
                )
            for message in trace.messages:
                if message.adapter is not None and message.adapter not in self.adapters:
                    raise TrainingError(
                        f"trace {trace.id!r} needs adapter {message.adapter!r}: loaded are only "
                        f"{sorted(self.adapters)!r}"
                    )
                if message.mapped and self.mapper is None:
                    raise TrainingError(f"trace {trace.id!r} has mapped messages: pass their mapper")
                if not 0 <= min(message.tokens) <= max(message.tokens) < adapter.vocabulary_size:
                    raise TrainingError(
                        f"message {message.name!r} of trace {trace.id!r} has invalid token ids: they run from 0 to "
                        f"{adapter.vocabulary_size - 1}"
                    )
