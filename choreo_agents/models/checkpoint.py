"""A checkpoint's files, as transformers reads them; what is wrong with them is said in a line."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
"""What transformers says of models that bring code."""


class Alone:
    """Entered while a model is made, by one thread of the process at a time.

    Transformers then changes what is everybody's: torch's default dtype, its own classes, and, by `discovery`'s name,
    the attention that is probed. Two models that were made at once would have each other's.
    """

    _turn: ClassVar[threading.RLock] = threading.RLock()

    def __enter__(self) -> None:
        Alone._turn.acquire()

    def __exit__(self, *_: object) -> None:
        Alone._turn.release()

    @classmethod
    def forked(cls) -> None:
        """In a process that was forked nobody would give it back."""
        cls._turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Alone.forked)


@dataclass(frozen=True)
class Checkpoint:
    """What is read of a model, piece by piece."""

    name: str
    """As it was asked for."""
    source: str | Path
    """As `from_pretrained` finds it."""
    config: PreTrainedConfig

    @classmethod
    def read(cls, name: str, source: str | Path) -> Checkpoint:
        """A model's configuration; raises `UnsupportedModelError` if transformers does not know what it is."""
        # Takes seconds: programs that only declare graphs, and commands that only print their help, load no model.
        from transformers import AutoConfig  # noqa: PLC0415

        with _in_a_line(name, "configuration"):
            if Path(source).is_dir() and not (Path(source) / "config.json").exists():
                raise OSError("there is no config.json")
            return cls(name, source, AutoConfig.from_pretrained(source, trust_remote_code=False))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - as in `read`

        with _in_a_line(self.name, "tokenizer"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
        return tokenizer

    def folder(self) -> Path:
        """Where its files are; those of a hub as far as they are in the local cache, and nowhere before that."""
        if Path(self.source).is_dir():
            return Path(self.source)
        found = try_to_load_from_cache(str(self.source), "config.json")
        return Path(found).parent if isinstance(found, str) else Path(self.source)

    def generation(self) -> Mapping[str, Any]:
        """What its `generation_config.json` says; nothing without one."""
        from transformers import GenerationConfig  # noqa: PLC0415 - as in `read`

        try:
            with _in_a_line(self.name, "generation settings"):
                said: Mapping[str, Any] = GenerationConfig.from_pretrained(self.source).to_diff_dict()
        except OSError:
            if (self.folder() / "generation_config.json").exists():
                raise
            return {}
        return said

    def parameters(self) -> int:
        """How many numbers its configuration has weights for."""
        return sum(weight.numel() for weight in self.skeleton().parameters())

    def skeleton(self) -> PreTrainedModel:
        """Its model, built without any weights."""
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - as in `read`

        with Alone(), _in_a_line(self.name, "configuration"), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        return model

    def model(self, device: torch.device, dtype: torch.dtype | None) -> PreTrainedModel:
        """Its model with its weights, straight on a device.

        Args:
            device: Where.
            dtype: In which; None: see `usual_dtype`.
        """
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - as in `read`

        where: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
        with _quiet() if self.source == WEIGHTS else nullcontext(), _in_a_line(self.name, "weights"):
            model: PreTrainedModel
            model, found = AutoModelForCausalLM.from_pretrained(
                self.source,
                config=self.config,
                dtype=dtype or "auto",
                use_safetensors=True,
                attn_implementation="eager",
                trust_remote_code=False,
                output_loading_info=True,
                **where,
            )
        if missing := sorted(found["missing_keys"]):
            raise OSError(
                f"the weights of {self.name!r} are not complete: {len(missing)} are missing, among them {missing[0]!r}"
            )
        require_served(model.dtype)
        if dtype is None and quantization_of(self.config) is None:
            # Weights whose dtype does not change are pages of their file until here.
            served = usual_dtype(model.dtype, device)
            if served != model.dtype:
                # To fp32 alone: to the dtype that it has it would round what transformers keeps in fp32, such as RoPE's
                # frequencies.
                model = model.to(served)
        return model.eval().requires_grad_(False)


@contextmanager
def _in_a_line(name: str, what: str) -> Iterator[None]:
    """Let whatever transformers raises, at whatever length, be an error of ours."""
    try:
        yield
    except ChoreoError:
        raise
    except Exception as error:  # transformers raises what its parts raise
        raise _ours(error, name, what) from error


def _ours(error: Exception, name: str, what: str) -> Exception:
    """What transformers has raised of a part of a model, as an error of ours."""
    it, said, line = f"the {what} of {name!r}", str(error), first_line(error)
    kind: type[Exception] = UnsupportedModelError
    if isinstance(error, SafetensorError | JSONDecodeError | RecursionError):
        kind, message = OSError, f"{it} are damaged: {error}"
    elif isinstance(error, torch.OutOfMemoryError):
        kind, advice = InvalidRequestError, "give another device, or a smaller model"
        message = f"{name!r} does not fit the device's memory ({line}): {advice}"
    elif isinstance(error, OSError):
        kind, message = OSError, f"{it} cannot be read: {line}"
    elif isinstance(error, ImportError):
        message = f"{it} cannot be read: {missing_package(line)}"
    elif any(words in said for words in _OWN_CODE):
        served = "only models that transformers itself knows are served"
        message = f"{it} is code that it brings along, which is not run: {served}"
    elif "ignore_mismatched_sizes" in said:
        kind, message = OSError, f"the weights of {name!r} have other shapes than its configuration says"
    elif "Unrecognized configuration class" in said:
        message = f"{name!r} is no causal language model that transformers knows"
    elif "instantiate the backend tokenizer" in said:
        kind, message = OSError, f"{it} cannot be read: there is no tokenizer.json, nor what it is made of"
    elif "Should have a `model_type` key" in said or "does not recognize this architecture" in said:
        message = f"the model type of {name!r} is unknown to the transformers that is installed: {line}"
    else:
        message = f"transformers cannot read {it}: {type(error).__name__}: {line}"
    return kind(message)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for what loads in an instant."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - as in `Checkpoint.read`

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
