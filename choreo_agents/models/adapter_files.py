"""Reads and writes LoRA adapters in peft's file layout."""

from __future__ import annotations

import filecmp
import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import regex
import torch
from torch import Tensor

from choreo_agents.errors import AdapterError
from choreo_agents.models.files import read_tensors, write_tensors, write_text
from choreo_agents.models.lora import LoraAdapter, LowRank, hook_layers, require_fit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PATTERNS_S = 1.0
_PREFIX = "base_model.model."
_PARTIAL = ".partial"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_OTHER_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Initialisations that change the base weights before the adapter is trained."""
_MORE_WEIGHTS = ("use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "layer_replication")
"""Options that train more than two matrices of each layer, or repeat layers."""
_NOT_ALONE = ("alora_invocation_tokens", "use_bdlora", "use_qalora", "kasa_config", "arrow_config", "monteclora_config")
"""Options that do more than add a low-rank product to each token's output."""


def read_adapter(folder: Path, model: PreTrainedModel, base: str) -> LoraAdapter:
    """Read an adapter and hook the model's layers for it.

    Args:
        folder: Folder with an `adapter_config.json` and safetensors, as peft writes them.
        model: The model that it is for.
        base: Fingerprint of the model's weights.

    Raises:
        AdapterError: It is no LoRA that can be applied per token, its files are damaged, or it is for another model.
    """
    config = _read_config(folder)
    try:
        tensors, metadata = read_tensors(folder / WEIGHTS_FILE)
    except OSError as error:
        raise AdapterError(f"the adapter in {str(folder)!r} cannot be read: {error}") from error
    require_base(f"the adapter in {str(folder)!r}", metadata.get("base"), base)
    downs = {_module(name, _DOWN): tensor for name, tensor in tensors.items() if name.endswith(_DOWN)}
    ups = {_module(name, _UP): tensor for name, tensor in tensors.items() if name.endswith(_UP)}
    unknown = [name for name in tensors if not name.endswith((_DOWN, _UP))]
    if unknown or downs.keys() != ups.keys() or not downs:
        wrong = unknown[0] if unknown else next(iter(downs.keys() ^ ups.keys()), "no lora_A")
        raise AdapterError(f"the adapter in {str(folder)!r} is not plain LoRA: it has {wrong!r}")
    scales, like = _scales(config, folder, downs), {"device": model.device, "dtype": model.dtype}
    parts = {name: LowRank(down.to(**like), ups[name].to(**like), scales[name]) for name, down in downs.items()}
    adapter = LoraAdapter(folder.name, _fingerprint(tensors, parts), parts)
    require_fit(model, adapter)
    hook_layers(model, list(parts))
    return adapter


def write_adapter(folder: Path, parts: Mapping[str, LowRank], base: str, *, name: str, dropout: float) -> None:
    """Write an adapter as peft does, with the fingerprint of the weights that it was trained on.

    Args:
        folder: Created if missing.
        parts: Low-rank parts by module; all of one rank and scale.
        base: Fingerprint of the base model's weights.
        name: Name that the base model was loaded by.
        dropout: Dropout that it was trained with.

    Raises:
        OSError: It cannot be written (see `exchanged`).
    """
    [rank], [scale] = {part.down.shape[0] for part in parts.values()}, {part.scale for part in parts.values()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": round(scale * rank, 9),
        "lora_dropout": dropout,
        "target_modules": sorted({module.rpartition(".")[2] for module in parts}),
    }
    tensors = {f"{_PREFIX}{module}{_DOWN}": part.down for module, part in parts.items()}
    tensors |= {f"{_PREFIX}{module}{_UP}": part.up for module, part in parts.items()}
    with exchanged(folder, (WEIGHTS_FILE, CONFIG_FILE)) as staging:
        write_text(staging / CONFIG_FILE, json.dumps(config, indent=2))
        write_tensors(staging / WEIGHTS_FILE, tensors, {"base": base})


@contextmanager
def exchanged(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield a folder to write files to; on exit they replace those of the target folder.

    Whenever the process is killed, the files are all old, all new, or cannot be loaded: weights without their config.
    Files with equal content are not touched.

    Args:
        folder: Target; created if missing. Leftovers of a killed writer are removed.
        names: The files to replace: an adapter's two and others. Those that are not written are deleted.

    Raises:
        OSError: They cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with TemporaryDirectory(dir=folder, prefix=_PARTIAL) as temporary:
        staging = Path(temporary)
        yield staging
        written = {name for name in names if (staging / name).exists()}
        _, differing, missing = filecmp.cmpfiles(staging, folder, names, shallow=False)
        # Those that are in neither folder are missing, too.
        differ = [*differing, *(name for name in missing if name in written or (folder / name).exists())]
        if len(differ) > 1:
            (folder / CONFIG_FILE).unlink(missing_ok=True)
            differ = [*{*differ, CONFIG_FILE}]
        # No state in between may look complete: write new weights first, delete old ones late, write the config last.
        late = {CONFIG_FILE: 3, WEIGHTS_FILE: 0 if WEIGHTS_FILE in written else 2}
        for name in sorted(differ, key=lambda name: late.get(name, 1)):
            if name in written:
                (staging / name).replace(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)


def require_base(subject: str, trained: str | None, serves: str) -> None:
    """Raise `AdapterError` if something was trained on other weights than those it is to serve."""
    if trained is not None and trained != serves:
        raise AdapterError(f"{subject} was trained for the weights {trained!r}, but this model's are {serves!r}")


def _read_config(folder: Path) -> dict[str, Any]:
    path, subject = folder / CONFIG_FILE, f"{CONFIG_FILE} in {str(folder)!r}"
    if not path.is_file():
        raise AdapterError(f"there is no {CONFIG_FILE} in {str(folder)!r}: pass a folder that peft wrote")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        kind = config["peft_type"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise AdapterError(f"{subject} cannot be read: {type(error).__name__}: {error}") from error
    if kind != "LORA":
        raise AdapterError(f"{subject} is of kind {kind!r}: only LoRA is supported")
    options = ["bias"] if config.get("bias") not in (None, "none") else []
    options += [name for name in (*_MORE_WEIGHTS, *_NOT_ALONE) if config.get(name)]
    if str(config.get("init_lora_weights")).startswith(_OTHER_WEIGHTS):
        options.append(f"init_lora_weights={config['init_lora_weights']!r}")
    if options:
        raise AdapterError(f"the adapter in {str(folder)!r} uses {options[0]}, which is not supported")
    return config


def _scales(config: Mapping[str, Any], folder: Path, downs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the scale of each module's part, from alpha, its patterns and rank, as peft computes it.

    The patterns are regular expressions from an untrusted file: all matching together may take one second.

    Args:
        config: The adapter's configuration.
        folder: Its folder, for error messages.
        downs: Down projections by module, [rank, inputs] each.

    Raises:
        AdapterError: An alpha is no number, or a pattern is no regular expression, or not matched in time.
    """
    where, until_s = f"{CONFIG_FILE} in {str(folder)!r}", time.monotonic() + _PATTERNS_S

    def number(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise AdapterError(f"{where} has alpha={value!r}, which is not a number")
        return float(value)

    def left_s() -> float:
        return max(1e-3, until_s - time.monotonic())

    alphas, scales = config.get("alpha_pattern") or {}, dict[str, float]()
    if not isinstance(alphas, dict):
        raise AdapterError(f"{where} cannot be read: its alpha_pattern is not an object")
    try:
        patterns = [(regex.compile(rf"(.*\.)?({pattern})$"), number(alpha)) for pattern, alpha in alphas.items()]
    except (regex.error, RecursionError) as error:
        raise AdapterError(f"{where} has an invalid alpha_pattern: {error}") from error
    usual = number(config.get("lora_alpha", 8))
    try:
        for module, down in downs.items():
            fitting = (alpha for pattern, alpha in patterns if pattern.match(module, timeout=left_s()))
            rank = down.shape[0]
            scales[module] = next(fitting, usual) / (rank**0.5 if config.get("use_rslora") else rank)
    except TimeoutError:
        raise AdapterError(f"{where} has an alpha_pattern that takes too long to match") from None
    return scales


def _module(name: str, end: str) -> str:
    return name.removeprefix(_PREFIX).removesuffix(end)


def _fingerprint(tensors: Mapping[str, Tensor], parts: Mapping[str, LowRank]) -> str:
    code = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        code.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        code.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    for module, part in sorted(parts.items()):
        code.update(f"{module}{part.scale!r}".encode())
    return code.hexdigest()[:16]
