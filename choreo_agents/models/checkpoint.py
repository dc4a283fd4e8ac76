"""Reads a checkpoint's files through transformers and turns its errors into one-line errors of ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError

from choreo_agents.errors import ChoreoError, InvalidRequestError, UnsupportedModelError
from choreo_agents.models.embedded import WEIGHTS
from choreo_agents.models.lines import first_line
from choreo_agents.models.weights.dtypes import require_served, usual_dtype
from choreo_agents.models.weights.quantized import missing_package, quantization_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_OWN_CODE = ("trust_remote_code", "contains custom code")
"""Parts of the error messages of transformers for models that bring their own code."""


building: Any = threading.RLock()
"""Held by the whole process while a model is built.

Building changes global state: torch's default dtype, classes of transformers, and the attention that `discovery`
registers. Two models that are built at once would get each other's.
"""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=building._at_fork_reinit)  # the thread that held it does not exist there


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration has been read; tokenizer, settings and weights are read on demand."""

    name: str
    """The name that the caller gave."""
    source: str | Path
    """Folder or hub name for `from_pretrained`."""
    config: PreTrainedConfig

    @classmethod
    def read(cls, name: str, source: str | Path) -> Checkpoint:
        """Read a model's configuration; raise `UnsupportedModelError` if transformers does not know its type."""
        # Imported late, as it takes seconds: declaring a graph or printing a command's help loads no model.
        from transformers import AutoConfig  # noqa: PLC0415

        with _raise_short_errors(name, "configuration"):
            if Path(source).is_dir() and not (Path(source) / "config.json").exists():
                raise OSError("there is no config.json")
            return cls(name, source, AutoConfig.from_pretrained(source, trust_remote_code=False))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - as in `read`

        with _raise_short_errors(self.name, "tokenizer"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
        return tokenizer

    def folder(self) -> Path:
        """Return the folder of its files; for a hub name, the one in the local cache, if it is there."""
        if Path(self.source).is_dir():
            return Path(self.source)
        config_path = try_to_load_from_cache(str(self.source), "config.json")
        return Path(config_path).parent if isinstance(config_path, str) else Path(self.source)

    def generation(self) -> Mapping[str, Any]:
        """Return the settings of `generation_config.json`; empty if there is no such file."""
        from transformers import GenerationConfig  # noqa: PLC0415 - as in `read`

        try:
            with _raise_short_errors(self.name, "generation settings"):
                settings: Mapping[str, Any] = GenerationConfig.from_pretrained(self.source).to_diff_dict()
        except OSError:
            if (self.folder() / "generation_config.json").exists():
                raise
            return {}
        return settings

    def skeleton(self) -> PreTrainedModel:
        """Build the model on the meta device, without weights."""
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - as in `read`

        with building, _raise_short_errors(self.name, "configuration"), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        return model

    def model(self, device: torch.device, dtype: torch.dtype | None) -> PreTrainedModel:
        """Load the model with its weights directly onto a device.

        Args:
            device: The device.
            dtype: Dtype of the weights; None: see `usual_dtype`.
        """
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - as in `read`

        where: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
        with _hide_progress() if self.source == WEIGHTS else nullcontext(), _raise_short_errors(self.name, "weights"):
            model: PreTrainedModel
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                self.source,
                config=self.config,
                dtype=dtype or "auto",
                use_safetensors=True,
                attn_implementation="eager",
                trust_remote_code=False,
                output_loading_info=True,
                **where,
            )
        if missing := sorted(loading_info["missing_keys"]):
            raise OSError(
                f"the weights of {self.name!r} are incomplete: {len(missing)} are missing, among them {missing[0]!r}"
            )
        require_served(model.dtype)
        if dtype is None and quantization_of(self.config) is None:
            # Weights whose dtype does not change are still memory-mapped pages of their file.
            served = usual_dtype(model.dtype, device)
            if served != model.dtype:
                # Only to fp32: a cast to the model's own dtype would round what transformers keeps in fp32, such as
                # RoPE's frequencies.
                model = model.to(served)
        return model.eval().requires_grad_(False)


@contextmanager
def _raise_short_errors(name: str, part: str) -> Iterator[None]:
    """Turn any exception of transformers, however long, into a short error of ours."""
    try:
        yield
    except ChoreoError:
        raise
    except Exception as error:  # transformers raises what its dependencies raise
        raise _translate_error(error, name, part) from error


def _translate_error(error: Exception, name: str, part: str) -> Exception:
    """Return an error of ours for what transformers raised while it read a part of a model."""
    subject, text, line = f"the {part} of {name!r}", str(error), first_line(error)
    kind: type[Exception] = UnsupportedModelError
    if isinstance(error, SafetensorError | JSONDecodeError | RecursionError):
        kind, message = OSError, f"{subject} are damaged: {error}"
    elif isinstance(error, torch.OutOfMemoryError):
        kind, advice = InvalidRequestError, "use another device, or a smaller model"
        message = f"{name!r} does not fit into the device's memory ({line}): {advice}"
    elif isinstance(error, OSError):
        kind, message = OSError, f"{subject} cannot be read: {line}"
    elif isinstance(error, ImportError):
        message = f"{subject} cannot be read: {missing_package(line)}"
    elif any(words in text for words in _OWN_CODE):
        served = "only models that are part of transformers are supported"
        message = f"{subject} is custom code, which is not executed: {served}"
    elif "ignore_mismatched_sizes" in text:
        kind, message = OSError, f"the weights of {name!r} have other shapes than its configuration"
    elif "Unrecognized configuration class" in text:
        message = f"{name!r} is not a causal language model that transformers supports"
    elif "instantiate the backend tokenizer" in text:
        kind, message = OSError, f"{subject} cannot be read: there is no tokenizer.json, and no files to build it from"
    elif "Should have a `model_type` key" in text or "does not recognize this architecture" in text:
        message = f"the model type of {name!r} is unknown to the installed version of transformers: {line}"
    else:
        message = f"transformers cannot read {subject}: {type(error).__name__}: {line}"
    return kind(message)


@contextmanager
def _hide_progress() -> Iterator[None]:
    """Hide the progress bar of transformers, for weights that load in an instant."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - as in `Checkpoint.read`

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
