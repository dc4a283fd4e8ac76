"""How a model attends, measured on the model itself: shapes, windows, soft caps, and how positions enter.

One token alone has the same hidden states wherever it stands, in every layer, if positions enter by rotation only.
So a batch of the same token at several positions shows each layer's rotation: its queries and keys must be those at
position 0, turned. What turns otherwise is refused.
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
"""Of the masks that the probe hands out: exact in every dtype, and no value that a real mask has."""
_POSITIONS = (0, 1, 2, 3, 17, 64, 255)
"""Where the token is placed, besides the last position and the middle."""
_PAIRINGS: tuple[Pairing, ...] = ("halves", "neighbours")


ModelAttention = tuple[KVGeometry, tuple[AttentionKind, ...]]
"""All that the engine needs to know of a model's attention: shapes, and the kind of each layer."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, by indices of batch, head, query and key."""


@dataclass(frozen=True)
class _Seen:
    """One attention call: [positions, heads, head_dim] each, the token on its own at every position."""

    query: Tensor
    key: Tensor
    value: Tensor
    masked: bool
    """Whether it was given a mask, ..."""
    visible: MaskFunction | None
    """... and what that lets it see; None if that is not the interface's business."""
    window: int | None
    """As the layer itself says."""
    softcap: float | None


def discover_attention(model: PreTrainedModel, max_positions: int, token: int) -> ModelAttention:
    """Measure how each layer attends.

    Args:
        model: In eval mode; its attention implementation is changed.
        max_positions: Its context length.
        token: Any token.

    Raises:
        UnsupportedModelError: A layer does not attend through the interface, or positions enter otherwise than by
            pure rotation of queries and keys.
    """
    positions = sorted({p for p in (*_POSITIONS, max_positions // 2, max_positions - 1) if p < max_positions})
    calls = _probe(model, positions, token)
    layers = model.config.get_text_config().num_hidden_layers
    missing = [layer for layer in range(layers) if layer not in calls]
    if len(missing) == layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not pass its attention through transformers' attention interface"
        )
    if missing:
        raise UnsupportedModelError(
            f"layers {missing} of {type(model).__name__} do not attend through transformers' attention interface: "
            "recurrent and linear layers have no keys and values to share"
        )
    if len(calls) > layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {layers} layers by its configuration and {len(calls)} that attend"
        )
    geometry = _geometry(calls, model.dtype)
    slack = _slack(positions, model.dtype)
    known = [PureRotation(*choice) for choice in _candidates(model, geometry.head_dim)]
    kinds = []
    for layer in range(layers):
        seen = calls[layer]
        window = _window(layer, seen, max_positions)
        _require_still(layer, seen.value, slack)
        kinds.append(AttentionKind(_rotation(layer, seen, positions, known, slack), window, seen.softcap))
    return geometry, tuple(kinds)


def _probe(model: PreTrainedModel, positions: Sequence[int], token: int) -> dict[int, _Seen]:
    """Run the token alone at each position; what each layer's attention was called with."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - loading the model has

    calls: dict[int, _Seen] = {}
    masks: list[MaskFunction | None] = []

    def mask(*_: Any, mask_function: MaskFunction | None = None, **__: Any) -> Tensor:
        """A mark by which the layers that get it tell which mask the model made for them."""
        masks.append(mask_function)
        return torch.full((1, 1, 1, 1), _FIRST_MARK + len(masks) - 1, device=model.device)

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        mark = -1.0 if attention_mask is None else float(attention_mask.flatten()[0]) - _FIRST_MARK
        if attention_mask is not None and mark not in range(len(masks)):
            raise UnsupportedModelError(f"{type(module).__name__} masks its attention in a way of its own")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedModelError(f"{type(module).__name__} does not say which layer's attention it is")
        if layer in calls:
            raise UnsupportedModelError(f"layer {layer} of {type(model).__name__} attends more than once")
        query_, key_, value_ = (part[:, :, 0].float().cpu() for part in (query, key, value))
        visible = None if attention_mask is None else masks[int(mark)]
        claimed = kwargs.get("sliding_window")
        calls[layer] = _Seen(query_, key_, value_, attention_mask is not None, visible, claimed, kwargs.get("softcap"))
        # A token that sees itself alone gets its own values, whatever the scores.
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
        # Transformers keeps what is registered for as long as the process lives, and these would keep the model.
        AttentionInterface.register(_PROBE, segment_attention)
        AttentionMaskInterface.register(_PROBE, no_mask)
    return calls


@contextmanager
def run_first(model: PreTrainedModel, how: str = "") -> Iterator[None]:
    """Let whatever a model's own layers raise when it is run for the first time be an error of ours, in a line.

    Args:
        model: That is run on a few tokens.
        how: In which way.
    """
    try:
        yield
    except ChoreoError:
        raise
    except torch.OutOfMemoryError as error:
        raise InvalidRequestError(
            f"the device's memory has no room for a few tokens beside the weights ({first_line(error)}): give another "
            "device, or a smaller model"
        ) from error
    except Exception as error:  # a family's layers raise what they like
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run on tokens{how}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _window(layer: int, seen: _Seen, max_positions: int) -> int | None:
    """How many positions a layer sees, its own among them; None: all before it.

    What the model's mask says counts, at distances that no short prompt reaches; without one, what the layer says.
    """
    if seen.visible is None:
        if seen.masked:
            raise UnsupportedModelError(f"layer {layer} has a mask that does not say what it lets it see")
        return seen.window if seen.window is not None and seen.window < max_positions else None
    last = max_positions - 1
    distances = torch.arange(max_positions)
    try:
        sees = _visible(seen.visible, torch.full_like(distances, last), last - distances)
        window = int(sees.sum())
        generator = torch.Generator().manual_seed(layer)
        query, key = torch.randint(max_positions, (2, 4096), generator=generator)
        near = (query - torch.randint(-2, min(2 * window, max_positions), (4096,), generator=generator)).clamp_min(0)
        query, key = torch.cat((query, query)), torch.cat((key, near.clamp_max(last)))
        right = _visible(seen.visible, query, key) == ((key <= query) & (query - key < window))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"what layer {layer} sees depends on more than positions: {error}") from error
    if not (bool(sees[:window].all()) and bool(right.all())):
        raise UnsupportedModelError(
            f"layer {layer} masks its attention otherwise than causally within a window: in chunks, both ways, "
            "or by what the tokens are"
        )
    if seen.window is not None and min(seen.window, max_positions) != window:
        raise UnsupportedModelError(
            f"layer {layer} says that it sees {seen.window} positions, its mask lets it see {window}: which of them "
            "counts depends on how transformers runs it"
        )
    return window if window < max_positions else None


def _visible(mask: MaskFunction, query: Tensor, key: Tensor) -> Tensor:
    """[pairs], whether a query at one position sees a key at another."""
    first = torch.zeros((), dtype=torch.long)
    return torch.as_tensor(mask(first, first, query, key)).expand(len(query)).bool()


def _geometry(calls: dict[int, _Seen], dtype: torch.dtype) -> KVGeometry:
    shapes = {(seen.key.shape[1:], seen.value.shape[1:]) for seen in calls.values()}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"layers have keys and values of different shapes: {sorted(map(str, shapes))}")
    [(key, value)] = shapes
    if key != value:
        raise UnsupportedModelError(
            f"keys of shape {tuple(key)} and values of shape {tuple(value)}: latent attention is not supported"
        )
    return KVGeometry(len(calls), key[0], key[1], dtype)


def _candidates(model: PreTrainedModel, head_dim: int) -> Iterator[tuple[Tensor, Pairing, int]]:
    """The model's own frequencies, in every way that dimensions are paired."""
    found: list[Tensor] = []
    for name, buffer in model.named_buffers():
        fits = buffer.ndim == 1 and 0 < 2 * len(buffer) <= head_dim
        if "inv_freq" in name and "original" not in name and fits:
            frequencies = buffer.float().cpu()
            if not any(torch.equal(frequencies, known) for known in found):
                found.append(frequencies)
    for sign, frequencies, pairing in product((1.0, -1.0), found, _PAIRINGS):
        for first in sorted({0, head_dim - 2 * len(frequencies)}):
            yield sign * frequencies, pairing, first


def _require_still(layer: int, values: Tensor, slack: Tensor) -> None:
    """Raise unless [positions, heads, head_dim] values are the same at each position."""
    if (_errors(values, values[:1].expand_as(values)) > slack).any():
        raise UnsupportedModelError(
            f"the hidden states before layer {layer} depend on the position: positions are learned or added, so that a "
            "message cannot be moved by a rotation"
        )


def _rotation(
    layer: int, seen: _Seen, positions: Sequence[int], known: Sequence[PureRotation], slack: Tensor
) -> PureRotation | None:
    """The rotation by which positions enter a layer; None if they do not."""
    for rotation in (None, *known):
        if all((_errors(v, _turned(rotation, v, positions)) <= slack).all() for v in (seen.query, seen.key)):
            return rotation
    raise UnsupportedModelError(
        f"queries or keys of layer {layer} change with the position otherwise than by a pure rotation with the model's "
        "own frequencies: scores would not depend on position differences only"
    )


def _turned(rotation: PureRotation | None, vectors: Tensor, positions: Sequence[int]) -> Tensor:
    """The first of [positions, heads, head_dim] vectors, turned to each position."""
    still = vectors[:1].expand_as(vectors)
    return still if rotation is None else rotation.apply(still, *rotation.cos_sin(torch.tensor(positions)))


def _errors(vectors: Tensor, wanted: Tensor) -> Tensor:
    """Relative errors, [positions]."""
    lengths = torch.linalg.vector_norm(wanted.flatten(1), dim=1).clamp_min(1e-30)
    errors: Tensor = torch.linalg.vector_norm((vectors - wanted).flatten(1), dim=1) / lengths
    return errors


def _slack(positions: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Relative errors that rounding explains: models compute angles in fp32, which loses radians far out."""
    return (1e-3 if dtype == torch.float32 else 3e-2) + torch.tensor(positions) * 2e-7
