"""Which models the engine can serve exactly, and a probe that checks it on the actual weights."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from choreo_agents.attention.folded import FoldedBackend
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.step import StepAttention
from choreo_agents.errors import UnsupportedModelError
from choreo_agents.kv.pool import KVPool
from choreo_agents.models.adapter import ModelAdapter

EXACT_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE variants whose frequencies do not depend on the length of the input: scores depend on differences only."""


def require_supported(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` with the reason unless the engine can serve models of this configuration."""
    if config.model_type != "llama":
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported: its attention or position scheme has not been shown "
            "to be exact under repositioning. Supported: 'llama'."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in EXACT_ROPE_TYPES:
        raise UnsupportedModelError(
            f"RoPE type {kind!r} is not supported: its frequencies change with the length of the input, so a cached "
            f"message cannot be moved by a rotation. Supported: {', '.join(EXACT_ROPE_TYPES)}."
        )
    if config.attention_dropout:
        # Harmless in eval mode, but worth no special case: Llama checkpoints have none.
        raise UnsupportedModelError(f"attention_dropout must be 0, not {config.attention_dropout!r}")


def plain_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """The model's own logits, [tokens, vocabulary], before its attention is routed to the engine."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
    logits: torch.Tensor = out.logits[0].float()
    return logits


def probe_tokens(vocabulary_size: int) -> list[int]:
    """A few tokens spread over the vocabulary, the same each time."""
    return [(7919 * (i + 1)) % vocabulary_size for i in range(12)]


def require_movable(adapter: ModelAdapter, tokens: list[int], expected: torch.Tensor) -> None:
    """Raise `UnsupportedModelError` unless moved segments give the logits that the plain forward gave.

    The prompt is encoded in two segments, each displaced from where it is shown: once all of it by one global shift,
    once with the first part encoded far behind the second. Scores must depend on position differences only.

    Args:
        adapter: The model, already routed to the engine's attention.
        tokens: At least four tokens.
        expected: `plain_logits` of the same tokens.
    """
    cut = len(tokens) // 2
    span = expected.abs().max().item()
    tolerance = span * (1e-4 if adapter.geometry.dtype == torch.float32 else 0.08)
    for shift_first, shift_rest in ((17, 17), (0, 29), (31, 0)):
        pool = KVPool(adapter.geometry, len(tokens) * 2 * adapter.geometry.bytes_per_token, adapter.device, 1)
        backend = FoldedBackend(adapter.rotation, adapter.geometry.dtype, adapter.device)
        first = Layout(
            positions=tuple(range(shift_first, shift_first + cut)),
            write_slots=tuple(range(cut)),
            reads=(Read(0, cut, (QuerySpan(0, cut, 0),), causal=True),),
        )
        rest_count = len(tokens) - cut
        rest = Layout(
            positions=tuple(range(shift_rest + cut, shift_rest + len(tokens))),
            write_slots=tuple(range(cut, len(tokens))),
            reads=(
                Read(0, cut, (QuerySpan(0, rest_count, shift_rest - shift_first),)),
                Read(cut, rest_count, (QuerySpan(0, rest_count, 0),), causal=True),
            ),
        )
        got = [
            adapter.logits(part, layout.positions, StepAttention(layout, pool, backend), range(len(part))).float()
            for part, layout in ((tokens[:cut], first), (tokens[cut:], rest))
        ]
        error = (torch.cat(got) - expected).abs().max().item()
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"the model's logits change by {error:.3g} when its cached keys are moved ({shift_first} and "
                f"{shift_rest} positions; at most {tolerance:.3g} is rounding): its positions are not a pure rotation"
            )
