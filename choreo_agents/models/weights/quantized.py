"""Checks quantised checkpoints: the packages that they need, and methods that are not supported."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from choreo_agents.errors import UnsupportedModelError
from choreo_agents.models.lines import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EXTRA = "choreo-agents[quantized]"
_FP8 = ("fbgemm_fp8", "fp8", "mxfp8")
_DENSE = ("compressed-tensors",)
_DENSE_ON_CPU = ("fp8", "mxfp4")
"""Methods whose weights are dequantised when loaded, so that they take more memory than their files."""


def quantization_of(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """Return the quantisation settings of a configuration; None if its weights are not quantised."""
    settings = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    setting = next(filter(None, settings), None)
    if setting is None:
        return None
    quantization: Mapping[str, Any] = setting if isinstance(setting, Mapping) else setting.to_dict()
    return quantization


def method_of(quantization: Mapping[str, Any]) -> str:
    """Return the name of the quantisation method, as checkpoints write it."""
    method = quantization.get("quant_method")
    named = str(getattr(method, "value", method) or "")
    bits = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
    return "bitsandbytes" if bits or named.startswith("bitsandbytes") else named


def require_loadable(config: PreTrainedConfig, dtype: torch.dtype | None) -> None:
    """Raise `UnsupportedModelError` if quantised weights cannot be loaded: a package is missing, or the dtype wrong.

    Args:
        config: The model's.
        dtype: The requested dtype; None: the checkpoint's own.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer  # noqa: PLC0415 - takes seconds

    method = method_of(quantization)
    try:
        # `from_pretrained` makes the same check, but only after all files are there.
        quantizer = AutoHfQuantizer.from_config(deepcopy(dict(quantization)), pre_quantized=True)
        quantizer.validate_environment(dtype=dtype, device_map=None, weights_only=True)
    except Exception as error:  # each method raises what it likes
        reason = first_line(error)
        reason = missing_package(reason) if isinstance(error, ImportError) else reason
        raise UnsupportedModelError(f"the weights are quantised with {method!r}: {reason}") from error
    if method in _FP8 and dtype not in (None, torch.bfloat16):
        raise UnsupportedModelError(
            f"the weights are FP8 ({method}), which are converted to bfloat16 and cannot be multiplied with "
            f"{str(dtype).removeprefix('torch.')}: pass bfloat16 or no dtype"
        )


def is_dense(quantization: Mapping[str, Any] | None, device: torch.device) -> bool:
    """Return whether a quantised model takes as much memory on a device as a plain one."""
    if quantization is None:
        return False
    method = method_of(quantization)
    return method in _DENSE or (device.type == "cpu" and method in _DENSE_ON_CPU)


def missing_package(reason: str) -> str:
    """Write the advice for a missing package."""
    return f"{reason}: pip install '{EXTRA}' for the tested methods (compressed-tensors and torchao)"
