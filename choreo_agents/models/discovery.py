"""Measures how a loaded model attends: shapes, windows, soft caps, and how positions enter.

If positions enter by rotation only, a single token has the same hidden states at any position, in every layer. So a
batch of one token at several positions shows each layer's rotation: its queries and keys must be those at position 0,
rotated. Any other model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.rope import Pairing, PureRotation
from choreo_agents.errors import ChoreoError, InvalidRequestError, UnsupportedModelError
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.models.hook import no_mask, segment_attention
from choreo_agents.models.lines import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE = "choreo_probe"
_FIRST_MARK = 32.5
"""Value of the first mask that the probe hands out: exact in every dtype, and in no real mask."""
_POSITIONS = (0, 1, 2, 3, 17, 64, 255)
"""Positions of the probe's token; the last position and the middle are added."""
_PAIRINGS: tuple[Pairing, ...] = ("halves", "neighbours")


ModelAttention = tuple[KVGeometry, tuple[AttentionKind, ...]]
"""A model's KV shapes, and the attention kind of each layer."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Returns whether a query sees a key, from indices of batch, head, query and key."""


@dataclass(frozen=True)
class _Call:
    """A recorded attention call; tensors are [positions, heads, head_dim], a single token at every position."""

    query: Tensor
    key: Tensor
    value: Tensor
    visible: MaskFunction | None
    """The function of the mask that it was given; None without a mask."""
    window: int | None
    """Sliding window in positions, as the layer itself gives it."""
    softcap: float | None


def discover_attention(model: PreTrainedModel, max_positions: int, token: int) -> ModelAttention:
    """Measure how each layer attends.

    Args:
        model: In eval mode; its attention implementation is changed.
        max_positions: Its context length in tokens.
        token: Id of any token.

    Raises:
        UnsupportedModelError: A layer does not attend through the interface, or positions enter otherwise than by
            pure rotation of queries and keys.
    """
    positions = sorted({p for p in (*_POSITIONS, max_positions // 2, max_positions - 1) if p < max_positions})
    calls = _probe(model, positions, token)
    layers = model.config.get_text_config().num_hidden_layers
    missing = [layer for layer in range(layers) if layer not in calls]
    if len(missing) == layers:
        raise UnsupportedModelError(f"{type(model).__name__} does not use transformers' attention interface")
    if missing:
        raise UnsupportedModelError(
            f"layers {missing} of {type(model).__name__} do not use transformers' attention interface: recurrent and "
            "linear layers have no keys and values to share"
        )
    if len(calls) > layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {layers} layers in its configuration, but {len(calls)} that attend"
        )
    geometry = _geometry(calls, model.dtype)
    slack = _tolerances(positions, model.dtype)
    rotations = [PureRotation(*choice) for choice in _candidates(model, geometry.head_dim)]
    kinds = []
    for layer in range(layers):
        call = calls[layer]
        window = _window(layer, call, max_positions)
        _require_equal(layer, call.value, slack)
        kinds.append(AttentionKind(_rotation(layer, call, positions, rotations, slack), window, call.softcap))
    return geometry, tuple(kinds)


def _probe(model: PreTrainedModel, positions: Sequence[int], token: int) -> dict[int, _Call]:
    """Run the token alone at each position; return the attention call of each layer."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - loading the model has

    calls: dict[int, _Call] = {}
    masks: list[MaskFunction | None] = []

    def mask(*_: Any, mask_function: MaskFunction | None = None, **__: Any) -> Tensor:
        """Return a marker value, so that `record` knows which of the model's masks a layer was given."""
        masks.append(mask_function)
        return torch.full((1, 1, 1, 1), _FIRST_MARK + len(masks) - 1, device=model.device)

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedModelError(f"{type(module).__name__} does not set its layer index")
        if layer in calls:
            raise UnsupportedModelError(f"layer {layer} of {type(model).__name__} attends more than once")
        query_, key_, value_ = (part[:, :, 0].float().cpu() for part in (query, key, value))
        visible = None
        if attention_mask is not None:
            mark = float(attention_mask.flatten()[0]) - _FIRST_MARK
            if mark not in range(len(masks)):
                raise UnsupportedModelError(f"{type(module).__name__} applies its own attention mask")
            if (visible := masks[int(mark)]) is None:
                raise UnsupportedModelError(f"layer {layer} has a mask that cannot be inspected")
        calls[layer] = _Call(query_, key_, value_, visible, kwargs.get("sliding_window"), kwargs.get("softcap"))
        # A token that sees only itself gets its own values, whatever the scores.
        group = query.shape[1] // value.shape[1]
        return value.repeat_interleave(group, dim=1).transpose(1, 2), None

    AttentionInterface.register(_PROBE, record)
    AttentionMaskInterface.register(_PROBE, mask)
    try:
        model.set_attn_implementation(_PROBE)
        with run_first(model, " with positions of their own"), torch.inference_mode():
            model(
                input_ids=torch.full((len(positions), 1), token, device=model.device),
                position_ids=torch.tensor(positions, device=model.device)[:, None],
                use_cache=False,
            )
    finally:
        # Transformers keeps registered functions for the life of the process, and these hold the model.
        AttentionInterface.register(_PROBE, segment_attention)
        AttentionMaskInterface.register(_PROBE, no_mask)
    return calls


@contextmanager
def run_first(model: PreTrainedModel, how: str = "") -> Iterator[None]:
    """Turn any exception of a model's layers in its first run into a one-line error of ours.

    Args:
        model: The model that is run on a few tokens.
        how: Added to the message, after "tokens".
    """
    try:
        yield
    except ChoreoError:
        raise
    except torch.OutOfMemoryError as error:
        raise InvalidRequestError(
            f"the device's memory is full with the weights ({first_line(error)}): use another device, or a smaller "
            "model"
        ) from error
    except Exception as error:  # modelling code raises anything
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run on tokens{how}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _window(layer: int, call: _Call, max_positions: int) -> int | None:
    """Return how many positions a layer sees, including its own; None: all before it.

    The model's mask decides, evaluated up to the full context length; without a mask, the layer's own setting.
    """
    if call.visible is None:
        return call.window if call.window is not None and call.window < max_positions else None
    last = max_positions - 1
    distances = torch.arange(max_positions)
    try:
        sees = _visible(call.visible, torch.full_like(distances, last), last - distances)
        window = int(sees.sum())
        generator = torch.Generator().manual_seed(layer)
        query, key = torch.randint(max_positions, (2, 4096), generator=generator)
        near = (query - torch.randint(-2, min(2 * window, max_positions), (4096,), generator=generator)).clamp_min(0)
        query, key = torch.cat((query, query)), torch.cat((key, near.clamp_max(last)))
        right = _visible(call.visible, query, key) == ((key <= query) & (query - key < window))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"the mask of layer {layer} depends on more than positions: {error}") from error
    if not (bool(sees[:window].all()) and bool(right.all())):
        raise UnsupportedModelError(
            f"the mask of layer {layer} is not causal within a window: it attends in chunks, in both directions, or by "
            "token type"
        )
    if call.window is not None and min(call.window, max_positions) != window:
        raise UnsupportedModelError(
            f"layer {layer} has a window of {call.window} positions, but its mask one of {window}: which of them "
            "applies depends on how transformers runs it"
        )
    return window if window < max_positions else None


def _visible(mask: MaskFunction, query: Tensor, key: Tensor) -> Tensor:
    """Return whether each query position sees its key position, [pairs]."""
    first = torch.zeros((), dtype=torch.long)
    return torch.as_tensor(mask(first, first, query, key)).expand(len(query)).bool()


def _geometry(calls: dict[int, _Call], dtype: torch.dtype) -> KVGeometry:
    shapes = {(call.key.shape[1:], call.value.shape[1:]) for call in calls.values()}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"layers have keys and values of different shapes: {sorted(map(str, shapes))}")
    [(key, value)] = shapes
    if key != value:
        raise UnsupportedModelError(
            f"keys of shape {tuple(key)} and values of shape {tuple(value)}: latent attention is not supported"
        )
    return KVGeometry(len(calls), key[0], key[1], dtype)


def _candidates(model: PreTrainedModel, head_dim: int) -> Iterator[tuple[Tensor, Pairing, int]]:
    """Yield the model's own frequencies in every pairing of dimensions, with either sign."""
    distinct: list[Tensor] = []
    for name, buffer in model.named_buffers():
        fits = buffer.ndim == 1 and 0 < 2 * len(buffer) <= head_dim
        if "inv_freq" in name and "original" not in name and fits:
            frequencies = buffer.float().cpu()
            if not any(torch.equal(frequencies, earlier) for earlier in distinct):
                distinct.append(frequencies)
    for sign, frequencies, pairing in product((1.0, -1.0), distinct, _PAIRINGS):
        for first in sorted({0, head_dim - 2 * len(frequencies)}):
            yield sign * frequencies, pairing, first


def _require_equal(layer: int, values: Tensor, slack: Tensor) -> None:
    """Raise `UnsupportedModelError` unless [positions, heads, head_dim] values are equal at all positions."""
    if (_relative_errors(values, values[:1].expand_as(values)) > slack).any():
        raise UnsupportedModelError(
            f"the hidden states before layer {layer} depend on the position: position embeddings are learned or added, "
            "and KV cannot be moved by a rotation"
        )


def _rotation(
    layer: int, call: _Call, positions: Sequence[int], rotations: Sequence[PureRotation], slack: Tensor
) -> PureRotation | None:
    """Return the rotation by which positions enter a layer; None if they do not."""
    for rotation in (None, *rotations):
        if all((_relative_errors(v, _rotate(rotation, v, positions)) <= slack).all() for v in (call.query, call.key)):
            return rotation
    raise UnsupportedModelError(
        f"queries or keys of layer {layer} depend on the position by more than a rotation with the model's "
        "frequencies: scores would not depend on position differences only"
    )


def _rotate(rotation: PureRotation | None, vectors: Tensor, positions: Sequence[int]) -> Tensor:
    """Rotate the first of [positions, heads, head_dim] vectors to each position."""
    still = vectors[:1].expand_as(vectors)
    return still if rotation is None else rotation.apply(still, *rotation.cos_sin(torch.tensor(positions)))


def _relative_errors(vectors: Tensor, expected: Tensor) -> Tensor:
    """Return relative errors, [positions]."""
    lengths = torch.linalg.vector_norm(expected.flatten(1), dim=1).clamp_min(1e-30)
    errors: Tensor = torch.linalg.vector_norm((vectors - expected).flatten(1), dim=1) / lengths
    return errors


def _tolerances(positions: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the relative errors that rounding explains: fp32 angles lose precision at far positions."""
    return (1e-3 if dtype == torch.float32 else 3e-2) + torch.tensor(positions) * 2e-7
