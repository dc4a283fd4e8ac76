"""Checks whether the engine can serve a model exactly: by its configuration, then by a probe of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.step import AttentionBackend, StepAttention
from choreo_agents.errors import UnsupportedModelError
from choreo_agents.kv.pool import KVPool
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.discovery import run_first

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
"""RoPE variants whose frequencies change with the length of the input."""
_SHIFTS = ((0, 0), (17, 17), (0, 29), (31, 0))
"""Positions by which the probe moves its two segments."""
_ROUNDED_LATER = 8.0
"""Factor from the effect of rounding the embeddings to that of rounding in all layers."""
_ROUTED_ELSEWHERE = 2.0
"""Factor on the largest effect of a few draws, since one bit may route a token to another expert."""
_DRAWS = 8
"""Draws of rounding noise for a model with experts in 16 bits; one for others, to save time."""
RECURRENT_LAYERS = ("mamba", "linear_attention", "recurrent", "conv", "moe_mamba", "hybrid")


def require_supported(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` if the configuration shows that the engine cannot serve the model exactly.

    The rest is measured on the loaded model: see `discovery`.
    """
    text = config.get_text_config()
    for model, reason in ((text, _text_reason(text)), (config, _tower_reason(config))):
        if reason is not None:
            raise UnsupportedModelError(f"model type {model.model_type!r} is not supported: {reason}")


def _tower_reason(config: PreTrainedConfig) -> str | None:
    """Return why a vision or audio model cannot be served on text alone; None if transformers can."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415 - reading the configuration has

    towers = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
    if not towers or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    modalities = " and ".join(name.removesuffix("_config") for name in towers)
    return f"it has a tower for {modalities}, and transformers does not run it on text only"


def _text_reason(config: PreTrainedConfig) -> str | None:
    """Return why a text configuration cannot be served exactly; None if no reason is known."""
    kinds = [rope.get("rope_type", rope.get("type")) for rope in _ropes(config)]
    changing = [kind for kind in kinds if kind in LENGTH_DEPENDENT_ROPE]
    recurrent = any(kind in RECURRENT_LAYERS for kind in getattr(config, "layer_types", None) or ())
    sizes = _head_sizes(config)
    scaled = any(rope.get("llama_4_scaling_beta") for rope in _ropes(config))
    reasons = {
        "it is an encoder-decoder; only decoders are supported": getattr(config, "is_encoder_decoder", False),
        "its scores have ALiBi biases, which a rotation of a query cannot move": (
            getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt")
        ),
        "its keys and values are latent (compressed); only keys and values by head are supported": (
            getattr(config, "kv_lora_rank", None)
        ),
        "it has recurrent layers, whose state cannot be composed from messages": (
            recurrent or getattr(config, "state_size", None) or config.model_type.startswith(("mamba", "rwkv"))
        ),
        f"RoPE type {', '.join(map(repr, changing))}: its frequencies change with the length of the input, so a cached "
        "message cannot be moved by a rotation": changing,
        f"its layers have keys and values of different shapes: head sizes {' and '.join(map(str, sizes))}": sizes[1:],
        "its queries are scaled by their absolute position": scaled
        or getattr(config, "attn_temperature_tuning", False),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _head_sizes(config: PreTrainedConfig) -> list[int]:
    """Return the distinct head sizes of all layers, as far as the configuration gives them."""
    settings = vars(config)
    sizes = [settings.get("head_dim"), settings.get("global_head_dim")]
    with suppress(AttributeError, TypeError, ValueError):  # not in the oldest supported transformers, nor in all models
        sizes += [layer.head_dim for layer in getattr(config, "per_layer_config", ())]
    return sorted({size for size in sizes if isinstance(size, int)})


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return RoPE parameters: one set, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    return nested or [rope]


def probe_prompt(model: PreTrainedModel) -> ProbePrompt:
    """Return a prompt of a few tokens, the model's logits, and how far rounding alone may move these.

    Raises:
        UnsupportedModelError: Its logits are not finite.
    """
    tokens = probe_tokens(model.config.get_text_config().vocab_size)

    def round_anew(_: torch.nn.Module, __: object, embedded: torch.Tensor) -> torch.Tensor:
        """Keep the first copy of the embeddings; add noise of one rounding step to the others."""
        noise = torch.rand(embedded[1:].shape, generator=torch.Generator().manual_seed(0)).to(embedded) * 2 - 1
        return torch.cat((embedded[:1], embedded[1:] * (1 + torch.finfo(embedded.dtype).eps * noise)))

    hook = model.get_input_embeddings().register_forward_hook(round_anew)
    try:
        # Not in inference mode: compressed-tensors makes the weights in the first forward pass, and gradients cannot
        # flow through inference tensors.
        with run_first(model), torch.no_grad():
            has_experts = any("experts" in name for name, _ in model.named_modules())
            draws = _DRAWS if has_experts and model.dtype != torch.float32 else 1
            out = model(input_ids=torch.tensor([tokens] * (1 + draws), device=model.device), use_cache=False)
    finally:
        hook.remove()
    plain = out.logits[0].float().cpu()
    if not plain.isfinite().all():
        advice = "use bfloat16 or float32" if model.dtype == torch.float16 else "its weights are damaged"
        raise UnsupportedModelError(f"the model's logits in {model.dtype} are not finite: {advice}")
    moved = [(plain - perturbed.float().cpu()).abs().max().item() for perturbed in out.logits[1:]]
    return ProbePrompt(tokens, plain, max(_ROUNDED_LATER * median(moved), _ROUTED_ELSEWHERE * max(moved)))


def probe_tokens(vocabulary_size: int) -> list[int]:
    """Return a few tokens spread over the vocabulary, always the same."""
    return [(7919 * (i + 1)) % vocabulary_size for i in range(12)]


@dataclass(frozen=True)
class ProbePrompt:
    """A prompt with the model's own logits, which every backend must reproduce."""

    tokens: list[int]
    logits: torch.Tensor
    """[tokens, vocabulary], on the host, from the model's own attention."""
    rounding: float = 0.0
    """Difference of the logits that rounding explains, estimated from noise on the embeddings.

    It is large in models of random weights, which amplify noise, and where one bit decides between two experts."""


@dataclass(frozen=True)
class MovedLogits:
    """Difference of logits from the plain forward pass when cached keys are moved."""

    error: float
    """The largest difference."""
    tolerance: float
    """The difference that rounding explains."""


def require_movable(adapter: ModelAdapter, prompt: ProbePrompt, backend: AttentionBackend) -> MovedLogits:
    """Raise `UnsupportedModelError` unless moved segments give the logits of the plain forward pass.

    The prompt is encoded in two segments, each shifted from the position where it is read: both by one shift, or either
    one alone. Scores must depend on position differences only.

    Args:
        adapter: The model, already routed to the engine's attention.
        prompt: A prompt of at least four tokens.
        backend: The attention backend.
    """
    cut = len(prompt.tokens) // 2
    expected = prompt.logits[cut:].to(adapter.device)
    span = expected.abs().max().item()
    usual = span * (1e-4 if adapter.geometry.dtype == torch.float32 else 0.08)
    tolerance = max(usual, prompt.rounding)
    errors = [(logits - expected).abs().max().item() for logits in _moved_logits(adapter, prompt.tokens, cut, backend)]
    for shifts, error in zip(_SHIFTS, errors, strict=True):
        if not error <= tolerance and not any(shifts):
            raise UnsupportedModelError(
                f"the model's logits differ by {error:.3g} from those of its layers as inspected (rounding is at most "
                f"{tolerance:.3g}): it does not attend causally over keys and values, or {type(backend).__name__} is "
                "wrong"
            )
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"the model's logits change by {error:.3g} when its cached keys are moved by {shifts[0]} and "
                f"{shifts[1]} positions (rounding is at most {tolerance:.3g}): its positions are not a pure rotation, "
                f"or {type(backend).__name__} is wrong"
            )
    return MovedLogits(max(errors), tolerance)


def _moved_logits(
    adapter: ModelAdapter, tokens: list[int], cut: int, backend: AttentionBackend
) -> Sequence[torch.Tensor]:
    """Return the logits after the cut for each pair of shifts of the two sides, [tokens - cut, vocabulary] each.

    All are computed in one step, since a forward pass of a few tokens costs as much as one of many.
    """
    length, tail = len(tokens), len(tokens) - cut
    pool = KVPool(adapter.geometry, len(_SHIFTS) * length * adapter.geometry.bytes_per_token, adapter.device, 1)
    positions: list[int] = []
    reads: list[Read] = []
    indices: list[int] = []
    for number, (shift, shift_tail) in enumerate(_SHIFTS):
        at = number * length  # row and slot
        own = shift_tail + cut
        positions += [*range(shift, shift + cut), *range(own, own + tail)]
        indices += range(at + cut, at + length)
        reads.append(Read(at, cut, shift, (QuerySpan(at, cut, 0),), causal=True))
        reads.append(Read(at, cut, shift, (QuerySpan(at + cut, tail, shift_tail - shift),)))
        reads.append(Read(at + cut, tail, own, (QuerySpan(at + cut, tail, 0),), causal=True))
    layout = Layout(tuple(positions), tuple(range(len(positions))), tuple(reads))
    attention = StepAttention(layout, pool, backend, adapter.kinds)
    logits = adapter.logits(tokens * len(_SHIFTS), positions, attention, indices)
    return torch.split(logits.float(), tail)
