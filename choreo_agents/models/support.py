"""Which models the engine can serve exactly, and a probe that checks it on the actual weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from choreo_agents.attention.backends.base import AttentionBackend
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.step import StepAttention
from choreo_agents.errors import UnsupportedModelError
from choreo_agents.kv.pool import KVPool
from choreo_agents.models.adapter import ModelAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
"""RoPE variants whose frequencies change with the length of the input."""
RECURRENT_LAYERS = ("mamba", "linear_attention", "recurrent", "conv", "moe_mamba", "hybrid")


def require_supported(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` if the configuration alone says that the engine cannot serve the model exactly.

    What it does not say is measured on the loaded model: see `discovery`.
    """
    config = config.get_text_config()
    reason = _reason(config)
    if reason is not None:
        raise UnsupportedModelError(f"model type {config.model_type!r} is not supported: {reason}")


def _reason(config: PreTrainedConfig) -> str | None:
    """Why a configuration cannot be served exactly; None if nothing is known against it."""
    kinds = [rope.get("rope_type", rope.get("type")) for rope in _ropes(config)]
    changing = [kind for kind in kinds if kind in LENGTH_DEPENDENT_ROPE]
    recurrent = any(kind in RECURRENT_LAYERS for kind in getattr(config, "layer_types", None) or ())
    scaled = any(rope.get("llama_4_scaling_beta") for rope in _ropes(config))
    reasons = (
        (
            getattr(config, "is_encoder_decoder", False),
            "it is an encoder-decoder; the engine serves decoders",
        ),
        (
            getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"),
            "its scores carry ALiBi biases, which no rotation of a query can move",
        ),
        (
            getattr(config, "kv_lora_rank", None),
            "its keys and values are latent (compressed); the engine keeps keys and values by head",
        ),
        (
            recurrent or getattr(config, "state_size", None) or config.model_type.startswith(("mamba", "rwkv")),
            "it has recurrent layers, whose state cannot be assembled from messages",
        ),
        (
            changing,
            f"RoPE type {', '.join(map(repr, changing))}: its frequencies change with the length of the input, so a "
            "cached message cannot be moved by a rotation",
        ),
        (
            scaled or getattr(config, "attn_temperature_tuning", False),
            "its queries are scaled by their absolute position",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """RoPE parameters: one set, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    return nested or [rope]


def plain_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """The model's own logits, [tokens, vocabulary], before its attention is routed to the engine."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
    logits: torch.Tensor = out.logits[0].float()
    return logits


def probe_tokens(vocabulary_size: int) -> list[int]:
    """A few tokens spread over the vocabulary, the same each time."""
    return [(7919 * (i + 1)) % vocabulary_size for i in range(12)]


@dataclass(frozen=True)
class ProbePrompt:
    """A prompt, and what the model itself makes of it: backends must agree with that."""

    tokens: list[int]
    logits: torch.Tensor
    """`plain_logits` of the tokens, on the host."""


@dataclass(frozen=True)
class MovedLogits:
    """How far logits are from the plain forward's when cached keys are moved."""

    error: float
    """The largest difference."""
    tolerance: float
    """What rounding explains."""


def require_movable(adapter: ModelAdapter, prompt: ProbePrompt, backend: AttentionBackend) -> MovedLogits:
    """Raise `UnsupportedModelError` unless moved segments give the logits that the plain forward gave.

    The prompt is encoded in two segments, each displaced from where it is shown: once all of it by one global shift,
    once with the first part encoded far behind the second. Scores must depend on position differences only.

    Args:
        adapter: The model, already routed to the engine's attention.
        prompt: Of four tokens at least.
        backend: Attends.
    """
    expected = prompt.logits.to(adapter.device)
    span = expected.abs().max().item()
    tolerance = span * (1e-4 if adapter.geometry.dtype == torch.float32 else 0.08)
    worst = 0.0
    for shifts in ((0, 0), (17, 17), (0, 29), (31, 0)):
        error = (_moved_logits(adapter, prompt.tokens, backend, *shifts) - expected).abs().max().item()
        if not error <= tolerance and not any(shifts):
            raise UnsupportedModelError(
                f"the model's logits differ by {error:.3g} from those that its layers give as they say they attend (at "
                f"most {tolerance:.3g} is rounding): it attends in another way than causally over keys and values, or "
                f"{type(backend).__name__} is wrong"
            )
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"the model's logits change by {error:.3g} when its cached keys are moved ({shifts[0]} and {shifts[1]} "
                f"positions; at most {tolerance:.3g} is rounding): its positions are not a pure rotation, or "
                f"{type(backend).__name__} is wrong"
            )
        worst = max(worst, error)
    return MovedLogits(worst, tolerance)


def _moved_logits(
    adapter: ModelAdapter, tokens: list[int], backend: AttentionBackend, shift_first: int, shift_rest: int
) -> torch.Tensor:
    """Logits of a prompt in two segments, each encoded so many positions behind where it is shown."""
    cut = len(tokens) // 2
    pool = KVPool(adapter.geometry, len(tokens) * 2 * adapter.geometry.bytes_per_token, adapter.device, 1)
    first = Layout(
        positions=tuple(range(shift_first, shift_first + cut)),
        write_slots=tuple(range(cut)),
        reads=(Read(0, cut, shift_first, (QuerySpan(0, cut, 0),), causal=True),),
    )
    count = len(tokens) - cut
    rest = Layout(
        positions=tuple(range(shift_rest + cut, shift_rest + len(tokens))),
        write_slots=tuple(range(cut, len(tokens))),
        reads=(
            Read(0, cut, shift_first, (QuerySpan(0, count, shift_rest - shift_first),)),
            Read(cut, count, shift_rest + cut, (QuerySpan(0, count, 0),), causal=True),
        ),
    )
    got = []
    for part, layout in ((tokens[:cut], first), (tokens[cut:], rest)):
        attention = StepAttention(layout, pool, backend, adapter.kinds)
        got.append(adapter.logits(part, layout.positions, attention, range(len(part))).float())
    return torch.cat(got)
