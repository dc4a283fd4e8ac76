"""Loads a model by path, hub name or `"embedded"`, and checks that its KV can be moved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from choreo_agents.arguments import refuses_unknown
from choreo_agents.attention.backends import (
    AttentionBackend,
    BackendName,
    backend_name,
    make_backend,
    require_backend,
    why_not_faster,
)
from choreo_agents.attention.backends.native import NativeBackend
from choreo_agents.attention.backends.triton.backend import TritonBackend
from choreo_agents.attention.kind import HeadShape
from choreo_agents.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from choreo_agents.models.adapter import ModelAdapter, max_positions
from choreo_agents.models.chat.format import ChatFormat, Role
from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.chat.tool_prompt import tools_format
from choreo_agents.models.checkpoint import Checkpoint, building
from choreo_agents.models.constraints import Grammars
from choreo_agents.models.discovery import discover_attention
from choreo_agents.models.embedded import WEIGHTS, vocabulary
from choreo_agents.models.fingerprint import WeightFiles
from choreo_agents.models.fused import FusedForward, fused_forward
from choreo_agents.models.hub_path import hub_path
from choreo_agents.models.lean import LeanForward, NotLean, lean_forward
from choreo_agents.models.lines import first_line
from choreo_agents.models.prompt_text import PromptText
from choreo_agents.models.safe_tokenization import SafeTokenizer, control_tokens, safe_tokenizer, token_bytes
from choreo_agents.models.support import (
    MovedLogits,
    ProbePrompt,
    probe_prompt,
    require_movable,
    require_supported,
)
from choreo_agents.models.weights.dtypes import dtype_named
from choreo_agents.models.weights.prepacked import prepack
from choreo_agents.models.weights.quantized import require_loadable
from choreo_agents.sampling import Sampler, SamplerCall, Sampling, checkpoint_sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMBEDDED = "embedded"
AUTO = "auto"
"""Device name for the GPU if there is one, else the CPU."""
_TOKEN_CHARACTERS = 64
"""Least number of characters per token that `longest_text` assumes: a tokenizer may merge or drop blanks."""
_SMALL = 1 << 23
"""Parameters of a model so small that a lean pass may copy its weights whatever memory is free."""
GenerationConfigUse = Literal["auto", "off"]
"""Whether the sampling settings of a checkpoint's `generation_config.json` are the defaults of its calls."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and chat format."""

    name: str
    adapter: ModelAdapter
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    safe_tokenizer: SafeTokenizer = field(repr=False)
    """Tokenizes `PromptText`: only its special parts may become control tokens."""
    probe: MovedLogits
    """Error of its logits when cached keys are moved, measured when it was loaded."""
    prompt: ProbePrompt = field(repr=False)
    """The prompt that this was measured with; other backends are checked with it, too."""
    prepacked: int = 0
    """Number of linear layers whose weights are prepacked for the CPU."""
    checked_backends: dict[BackendName | int, AttentionBackend] = field(default_factory=dict, repr=False)
    """Backends that passed the check, by name, or by `id` if they are the user's own."""
    sampling_defaults: Sampling = Sampling()
    """Sampling settings of its checkpoint, for the fields that a call leaves open."""
    sampler: Callable[[SamplerCall], Sampler] | None = None
    """Makes the sampler of a scripted model's decode; None: sample from its logits.

    Called under the engine's lock, once for each answer that is really decoded, before any work: it may raise."""
    fallback_reason: str | None = None
    """Why transformers' modelling code runs the model; None: a lean or fused pass does."""

    def backend(self, backend: BackendName | AttentionBackend) -> AttentionBackend:
        """Return the backend of a name, or the given one, after checking that the model is exact with it.

        Raises:
            UnsupportedModelError: The model is not exact with it.
            InvalidRequestError: There is no such backend, or it does not work here.
        """
        key = backend if isinstance(backend, str) else id(backend)
        if key not in self.checked_backends:
            instance = _backend(self.adapter, backend)
            require_movable(self.adapter, self.prompt, instance)
            self.checked_backends[key] = instance
        return self.checked_backends[key]

    def computed_with(self, backend: AttentionBackend) -> str:
        """Name what runs the model with an attention backend: `lean`, `fused`, or transformers and why."""
        if self.fallback_reason is not None:
            return f"transformers: {self.fallback_reason}"
        if self.adapter.lean is None:
            return "transformers: its weights or modules have changed since it was loaded"
        if isinstance(self.adapter.lean, FusedForward):
            return "fused"
        if not isinstance(backend, NativeBackend):
            return f"transformers: the lean forward pass does not support {backend_name(backend)}"
        return "lean"

    @cached_property
    def controls(self) -> Mapping[int, str]:
        """Text of its control tokens, by id."""
        return control_tokens(self.tokenizer)

    @cached_property
    def visible_controls(self) -> frozenset[str]:
        """Texts of the control tokens that are not special, so that they show in decoded text."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(text for number, text in self.controls.items() if not added[number].special)

    def __repr__(self) -> str:
        return f"LoadedModel({self.name}, {self.adapter.geometry.dtype} on {self.adapter.device})"

    @property
    def has_embedded_vocabulary(self) -> bool:
        """True if its vocabulary contains the embedded model's."""
        return bool(vocabulary().items() <= self.tokenizer.get_vocab().items())

    @cached_property
    def grammars(self) -> Grammars:
        """Compiler of constraints over its tokens, made on first use.

        Raises:
            InvalidRequestError: The extra `guided` is not installed, or its tokens cannot be constrained; says why.
        """
        return Grammars(self.tokenizer, self.adapter.vocabulary_size, self.adapter.end_tokens)

    @cached_property
    def longest_text(self) -> int:
        """Characters of the longest text that is tokenized: per position, as many as the longest token has, or 64.

        A longer text would keep the tokenizer busy for minutes, and its tokens could not fit the context.
        """
        return self.adapter.max_positions * max(_TOKEN_CHARACTERS, max(map(len, self.tokenizer.get_vocab()), default=0))

    def encode(self, text: str | PromptText) -> list[int]:
        """Return the token ids of a text, none added. In a `str`, any control token counts.

        Raises:
            ContextLengthError: It is longer than `longest_text`.
        """
        if len(text) > self.longest_text:
            raise ContextLengthError(
                f"a text of {len(text):,} characters is too long: the model's context is "
                f"{self.adapter.max_positions:,} tokens, which take at most {self.longest_text:,} characters"
            )
        if isinstance(text, PromptText):
            return self.safe_tokenizer.encode(text)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes]:
        """Function from a token to its bytes, which may be a part of a character."""
        return token_bytes(self.tokenizer)

    @cached_property
    def closing_tokens(self) -> frozenset[int]:
        """Tokens that, as the last of an answer, only end the turn."""
        closing = self.encode(PromptText.special(self.chat.turn_end))
        count = self.turn_end_length(closing)
        calls = (self.encode(PromptText.special(end))[:1] for end in tools_format(self.chat).ends)
        return frozenset((*self.adapter.end_tokens, *closing[max(0, count - 1) : count], *chain.from_iterable(calls)))

    def opening(self, tokens: Sequence[int]) -> str:
        """Return the text that opens the turn which the tokens are, before name and text.

        If they are no turn: the opening of an assistant's turn, or of a user's if that is empty; "" if the template
        opens no turn.
        """
        roles: tuple[Role, ...] = ("assistant", "user", "system")
        starts = {role: self.encode(self.chat.start(role)) for role in roles}
        opened = [role for role in roles if starts[role]]
        begun = [role for role in opened if [*tokens[: len(starts[role])]] == starts[role]]
        best = max(begun, key=lambda role: len(starts[role]), default=opened[0] if opened else None)
        return "" if best is None else self.chat.start(best)

    def as_user_part(self, tokens: Sequence[int]) -> PromptText:
        """Return the text of a whole turn, an answer's with its speaker's name, as a part of a user's turn."""
        for form in (self.chat.assistant, self.chat.user):
            opening, closing = self.encode(form.plain.rstrip(" ")), self.encode(form.after)
            if [*tokens[: len(opening)]] == opening:
                ended = bool(closing) and [*tokens[-len(closing) :]] == closing
                words = tokens[len(opening) : len(tokens) - len(closing) if ended else None]
                return self.chat.part(self.decode([*words], special=False))
        return self.chat.part(self.decode([*tokens], special=False))

    def turn_end_length(self, closing: Sequence[int]) -> int:
        """Return how many tokens of a turn's closing show that it is over: up to the first that is not blank."""
        texts = (self.decode([token]) for token in closing)
        return next((number for number, text in enumerate(texts, start=1) if text.strip()), min(1, len(closing)))

    def decode(self, tokens: list[int], *, special: bool = True) -> str:
        """Return the text of token ids, with or without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def usual_device() -> str:
    """Return the device that `"auto"` means."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(device: str | torch.device) -> torch.device:
    """Return the device of a name, for `"auto"` the GPU if any; raise `InvalidRequestError` if it cannot be used."""
    try:
        tensor = torch.ones(1, device=torch.device(usual_device() if device == AUTO else device))
        assert tensor.item() == 1.0, "it does not keep what is written there"
    except Exception as error:  # backends that are missing raise anything
        raise InvalidRequestError(
            f'device {str(device)!r} cannot be used: pass "cpu", "cuda", "cuda:1" or "auto" ({first_line(error)})'
        ) from error
    return tensor.device


def open_checkpoint(
    name: str | Path, device: str | torch.device, dtype: torch.dtype | None, *, weights: bool = True
) -> tuple[Checkpoint, torch.device]:
    """Return a checkpoint whose configuration can be served, and the device to serve it on.

    Args:
        name: See `load_model`.
        device: See `load_model`.
        dtype: The requested dtype; None: the default.
        weights: Whether the weights are needed, too, and not only the small files.

    Raises:
        ChoreoError: As `load_model`, with only small files read.
    """
    source = WEIGHTS if str(name) == EMBEDDED else hub_path(name, weights=weights)
    # It is small enough to be faster on a CPU, and gives the same answers on every machine.
    where = usable_device("cpu" if source == WEIGHTS and device == AUTO else device)
    checkpoint = Checkpoint.read(str(name), source)
    require_supported(checkpoint.config)
    require_loadable(checkpoint.config, dtype)
    return checkpoint, where


def context_of(name: str) -> int | None:
    """Return the context length, in tokens, of a model that need not be loaded; None: it is in no folder here."""
    source = WEIGHTS if name == EMBEDDED else Path(name)
    return max_positions(Checkpoint.read(name, source).config.get_text_config()) if source.is_dir() else None


@refuses_unknown()
def load_model(
    name: str | Path,
    *,
    device: str | torch.device = AUTO,
    dtype: torch.dtype | str | None = None,
    prepacked: bool = True,
    generation_config: GenerationConfigUse = "auto",
    backend: BackendName | AttentionBackend = "auto",
    chat: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Load a model and check on its weights that cached messages can be moved exactly.

    Args:
        name: `"embedded"`, a folder in Hugging Face's layout, or a hub name. Weights are read from safetensors only.
        device: Where the model runs; `"auto"`: the GPU if there is one.
        dtype: Dtype of weights and KV, as torch or Hugging Face names it: `torch.bfloat16`, `"bfloat16"`, `"bf16"`; by
            default, or `"auto"`, the checkpoint's own, or fp32 on a CPU that has no kernels for it.
        prepacked: Prepack large linear weights for the CPU if memory allows: about twice as fast. Memory-mapped plain
            weights stay beside them; converted ones are replaced.
        generation_config: `"auto"`: calls use the sampling settings of the checkpoint's `generation_config.json` where
            they set none (`LoadedModel.sampling_defaults`); `"off"`: they decode greedily. Its end tokens apply in
            both cases.
        backend: The attention backend; the check is made with it.
        chat: Variables of the model's chat template by name, such as `enable_thinking`; and `date`, the day that it
            writes as today.

    Raises:
        UnsupportedModelError: The model cannot be served exactly; says why, if possible before weights are read.
        InvalidRequestError: The device or the backend cannot be used, or the model does not fit it.
        ModelNotFoundError: There is no such model, or the hub that may have it cannot be reached.
        OSError: Its files are damaged.
    """
    if not isinstance(name, str | Path):
        raise InvalidRequestError(f'a model must be "embedded", a folder, a hub name or a loaded model: not {name!r}')
    if chat is not None and not isinstance(chat, Mapping):
        raise InvalidRequestError(f'chat must map variables, such as {{"enable_thinking": True}}, not {chat!r}')
    require_backend(backend)
    dtype = dtype_named(dtype)
    if generation_config not in get_args(GenerationConfigUse):
        raise InvalidRequestError(f'generation_config must be "auto" or "off", not {generation_config!r}')
    checkpoint, device = open_checkpoint(name, device, dtype)
    # Check the small files before gigabytes are read.
    tokenizer = checkpoint.tokenizer()
    turns, safe = chat_format(tokenizer, chat), safe_tokenizer(tokenizer)
    checkpoint.generation()  # transformers would ignore a damaged one, and its stop tokens
    files = WeightFiles.of(checkpoint.folder())  # as they are before they are read
    with building:
        model = checkpoint.model(device, dtype)
        text = model.config.get_text_config()
        prompt = probe_prompt(model)
        attention = discover_attention(model, max_positions(text), prompt.tokens[0])
        adapter = ModelAdapter(model, attention, files, tokenizer.eos_token_id)
        served = _backend(adapter, backend)
        probe = require_movable(adapter, prompt, served)
    packed = prepack(model, replacing=True) if prepacked else 0
    modelling = _lean(adapter, prompt, served, packed=packed) if prepacked else "prepacking is off"
    exact_with = {backend if isinstance(backend, str) else id(backend): served}
    config = {} if model.generation_config is None or generation_config == "off" else model.generation_config.to_dict()
    defaults = checkpoint_sampling(config)
    extras = (packed, exact_with, defaults, None, modelling)
    loaded = LoadedModel(str(name), adapter, tokenizer, turns, safe, probe, prompt, *extras)
    computes = loaded.computed_with(served)
    why = why_not_faster(served)
    logging.getLogger(__name__).info(
        "%s: attention by %s%s, computed by %s", name, backend_name(served), why and f" ({why})", computes
    )
    return loaded


def _lean(adapter: ModelAdapter, prompt: ProbePrompt, served: AttentionBackend, *, packed: int) -> str | None:
    """Attach a lean or fused pass to a model if there is one and it is exact; return why not."""
    make: Callable[[Any, HeadShape], LeanForward | FusedForward] = fused_forward
    if adapter.device.type != "cuda" and not isinstance(served, TritonBackend):
        if not packed and adapter.parameters > _SMALL:
            return "its weights are not prepacked for the CPU"
        try:
            make, served = lean_forward, served if isinstance(served, NativeBackend) else _backend(adapter, "native")
        except InvalidRequestError as reason:
            return str(reason)
    try:
        adapter.lean = make(adapter.model, _heads(adapter))
        require_movable(adapter, prompt, served)
    except NotLean as reason:
        adapter.lean = None
        return str(reason)
    except UnsupportedModelError as error:
        adapter.lean = None
        return f"its layers compute something else than their modules suggest: {error}"
    return None


def _backend(adapter: ModelAdapter, backend: BackendName | AttentionBackend) -> AttentionBackend:
    return make_backend(backend, adapter.geometry.dtype, adapter.device, _heads(adapter))


def _heads(adapter: ModelAdapter) -> HeadShape:
    return HeadShape(adapter.heads, adapter.geometry.kv_heads, adapter.geometry.head_dim)
