"""A Hugging Face model as the runtime sees it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from choreo_agents.attention.rope import PureRotation
from choreo_agents.attention.step import StepAttention
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.models.hook import IMPLEMENTATION

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelAdapter:
    """One forward pass over a packed row of tokens whose attention the engine decides.

    Args:
        model: A supported model (see `choreo_agents.models.support`), in eval mode on its device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self._model = model
        self.device: torch.device = model.device
        self.fingerprint = fingerprint(model)
        self.max_positions: int = config.max_position_embeddings
        self.vocabulary_size: int = config.vocab_size
        self.parameters: int = model.num_parameters()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.geometry = KVGeometry(config.num_hidden_layers, config.num_key_value_heads, head_dim, model.dtype)
        self.rotation = PureRotation(model.model.rotary_emb.inv_freq.float())
        ends = model.generation_config.eos_token_id if model.generation_config is not None else config.eos_token_id
        self.end_tokens: tuple[int, ...] = () if ends is None else tuple(ends if isinstance(ends, list) else [ends])
        model.set_attn_implementation(IMPLEMENTATION)

    @torch.inference_mode()
    def logits(
        self, tokens: Sequence[int], positions: Sequence[int], attention: StepAttention, wanted: Sequence[int]
    ) -> Tensor:
        """Encode a step's tokens and return the logits after some of them.

        Args:
            tokens: Token ids of all rows, packed.
            positions: Each token's own position.
            attention: Where keys and values go, and what each token attends to.
            wanted: Indices into `tokens`.

        Returns:
            [len(wanted), vocabulary].
        """
        out = self._model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, device=self.device, dtype=torch.long),
            step_attention=attention,
        )
        logits: Tensor = out.logits[0]
        return logits


def fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits that tell models apart: architecture, dtype, and every row of every tensor."""
    settings = model.config.to_diff_dict()
    for cosmetic in ("_name_or_path", "transformers_version", "_attn_implementation_internal", "dtype", "torch_dtype"):
        settings.pop(cosmetic, None)
    code = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    code.update(str(model.dtype).encode())
    for name, tensor in sorted(model.state_dict().items()):
        code.update(f"{name}{tuple(tensor.shape)}".encode())
        # Sums of bit patterns: every weight counts, one pass over memory, and exact whatever the order of addition.
        bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
        rows = bits.sum(dim=-1, dtype=torch.int64) if bits.ndim else bits.to(torch.int64)
        code.update(rows.cpu().numpy().tobytes())
        code.update(bits.flatten()[:: max(1, bits.numel() // 4096)][:4096].cpu().numpy().tobytes())
    return code.hexdigest()[:16]
