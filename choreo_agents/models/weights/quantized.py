"""Checks quantised checkpoints: the packages that they need, and methods that are not supported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from choreo_agents.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EXTRA = "choreo-agents[quantized]"
_PACKAGES: Mapping[str, Mapping[str, str]] = {
    "aqlm": {"aqlm": "aqlm"},
    "auto-round": {"auto_round": "auto-round"},
    "awq": {"gptqmodel": "gptqmodel"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "eetq": {"kernels": "kernels"},
    "fouroversix": {"fouroversix": "fouroversix"},
    "fp_quant": {"fp_quant": "fp_quant", "qutlass": "qutlass"},
    "gptq": {"gptqmodel": "gptqmodel", "optimum": "optimum"},
    "higgs": {"flute": "flute-kernel", "fast_hadamard_transform": "fast_hadamard_transform"},
    "hqq": {"hqq": "hqq"},
    "quanto": {"optimum.quanto": "optimum-quanto"},
    "quark": {"quark": "amd-quark"},
    "sinq": {"sinq": "sinq"},
    "spqr": {"spqr_quant": "spqr_quant"},
    "torchao": {"torchao": "torchao"},
    "vptq": {"vptq": "vptq"},
}
"""For each method, the modules that it needs and the packages that provide them."""
_ALONE = ("bitnet", "fbgemm_fp8", "fp8", "metal", "mxfp4", "mxfp8", "nvfp4")
"""Methods that need only transformers, and some a GPU."""
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
    method = method_of(quantization)
    if method not in _PACKAGES and method not in _ALONE:
        supported = ", ".join(sorted([*_PACKAGES, *_ALONE]))
        raise UnsupportedModelError(f"the weights are quantised by {method!r}, which nobody here reads: of {supported}")
    missing = [package for module, package in _PACKAGES.get(method, {}).items() if not _importable(module)]
    if missing:
        reason = f"that needs {' and '.join(missing)}"
        raise UnsupportedModelError(f"the weights are quantised by {method}: {missing_package(reason, *missing)}")
    if method in _FP8 and dtype not in (None, torch.bfloat16):
        raise UnsupportedModelError(
            f"the weights are FP8 ({method}), which become bfloat16 and cannot be multiplied with "
            f"{str(dtype).removeprefix('torch.')}: give bfloat16 or no dtype"
        )


def is_dense(quantization: Mapping[str, Any] | None, device: torch.device) -> bool:
    """Return whether a quantised model takes as much memory on a device as a plain one."""
    if quantization is None:
        return False
    method = method_of(quantization)
    return method in _DENSE or (device.type == "cpu" and method in _DENSE_ON_CPU)


def missing_package(reason: str, *packages: str) -> str:
    """Write the advice for a missing package."""
    install = f"pip install {' '.join(packages)}, or " if packages else ""
    return f"{reason}: {install}pip install '{EXTRA}' for what is tested here (compressed-tensors and torchao)"


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
