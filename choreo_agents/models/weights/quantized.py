"""Quantised checkpoints: which packages they need, and what cannot be served whatever is installed."""

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
"""By method, what must be importable, and in which package it comes."""
_ALONE = ("bitnet", "fbgemm_fp8", "fp8", "metal", "mxfp4", "mxfp8", "nvfp4")
"""Methods that need nothing but transformers, if at times a GPU."""
_FP8 = ("fbgemm_fp8", "fp8", "mxfp8")
_DENSE = ("compressed-tensors",)
_DENSE_ON_CPU = ("fp8", "mxfp4")
"""Methods whose weights are numbers of the model's dtype again once it is loaded: their files are smaller than they."""


def quantization_of(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """What a configuration says of how its weights were quantised; None if they were not."""
    told = (getattr(each, "quantization_config", None) for each in (config, config.get_text_config()))
    found = next(filter(None, told), None)
    if found is None:
        return None
    said: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    return said


def method_of(quantization: Mapping[str, Any]) -> str:
    """The method's name, as checkpoints write it."""
    method = quantization.get("quant_method")
    named = str(getattr(method, "value", method) or "")
    bits = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
    return "bitsandbytes" if bits or named.startswith("bitsandbytes") else named


def require_loadable(config: PreTrainedConfig, dtype: torch.dtype | None) -> None:
    """Raise `UnsupportedModelError` if quantised weights cannot be loaded: a package is missing, or the dtype wrong.

    Args:
        config: The model's.
        dtype: That was asked for; None: the checkpoint's own.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return
    method = method_of(quantization)
    if method not in _PACKAGES and method not in _ALONE:
        known = ", ".join(sorted([*_PACKAGES, *_ALONE]))
        raise UnsupportedModelError(f"the weights are quantised by {method!r}, which nobody here reads: of {known}")
    lacking = [package for module, package in _PACKAGES.get(method, {}).items() if not _importable(module)]
    if lacking:
        said = f"that needs {' and '.join(lacking)}"
        raise UnsupportedModelError(f"the weights are quantised by {method}: {missing_package(said, *lacking)}")
    if method in _FP8 and dtype not in (None, torch.bfloat16):
        raise UnsupportedModelError(
            f"the weights are FP8 ({method}), which become bfloat16 and cannot be multiplied with "
            f"{str(dtype).removeprefix('torch.')}: give bfloat16 or no dtype"
        )


def is_dense(quantization: Mapping[str, Any] | None, device: torch.device) -> bool:
    """Whether a quantised model takes as much memory on a device as one that is not quantised."""
    if quantization is None:
        return False
    method = method_of(quantization)
    return method in _DENSE or (device.type == "cpu" and method in _DENSE_ON_CPU)


def missing_package(said: str, *packages: str) -> str:
    """What to do about a package that is not there."""
    install = f"pip install {' '.join(packages)}, or " if packages else ""
    return f"{said}: {install}pip install '{EXTRA}' for what is tested here (compressed-tensors and torchao)"


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
