"""Loads a model by path, hub name or `"embedded"`."""

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
from choreo_agents.attention.heads import HeadShape
from choreo_agents.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from choreo_agents.models.adapter import ModelAdapter, max_positions
from choreo_agents.models.chat import ChatFormat, Role, chat_format, tools_format
from choreo_agents.models.checkpoint import Alone, Checkpoint
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
"""Of a device: the GPU if there is one."""
_TOKEN_CHARACTERS = 64
"""That a token may stand for at least: of blanks, say, which a tokenizer may drop."""
_SMALL = 1 << 23
"""Parameters of a model whose weights may be laid out beside the plain ones without asking how much memory there is."""
GenerationConfigUse = Literal["auto", "off"]
"""Whether what a checkpoint's `generation_config.json` says about sampling is the default of its calls."""


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer, and how its chat turns are written."""

    name: str
    adapter: ModelAdapter
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    safe_tokenizer: SafeTokenizer = field(repr=False)
    """How its tokenizer writes text in which control tokens count in frames only."""
    probe: MovedLogits
    """What moving cached keys did to its logits when it was loaded."""
    prompt: ProbePrompt = field(repr=False)
    """With which that was found out, and is found out of other backends."""
    prepacked: int = 0
    """Linear layers whose weights were laid out for the CPU."""
    exact_with: dict[BackendName | int, AttentionBackend] = field(default_factory=dict, repr=False)
    """Backends with which the model was found to be exact, by name, or `id` if they are a user's own."""
    sampling_defaults: Sampling = Sampling()
    """What its checkpoint says about sampling, for calls that do not: the fields that are set."""
    sampler: Callable[[SamplerCall], Sampler] | None = None
    """Makes what chooses a decode's tokens, of a model that is told what to say; None: its logits do. Called under the
    engine's lock, once for each answer that is really decoded, before any work is done: it may refuse."""
    modelling: str | None = None
    """Why the modelling code of transformers computes it, and no lean pass; None: one does."""

    def backend(self, wanted: BackendName | AttentionBackend) -> AttentionBackend:
        """The backend of that name, or this very one: the model is exact with it.

        Raises:
            UnsupportedModelError: It is not. InvalidRequestError: There is no such backend, or it does not work here.
        """
        key = wanted if isinstance(wanted, str) else id(wanted)
        if key not in self.exact_with:
            made = _backend(self.adapter, wanted)
            require_movable(self.adapter, self.prompt, made)
            self.exact_with[key] = made
        return self.exact_with[key]

    def computed_with(self, backend: AttentionBackend) -> str:
        """What computes the rest of a step, where this attends: `lean`, `fused`, or transformers and why."""
        if self.modelling is not None:
            return f"transformers: {self.modelling}"
        if self.adapter.lean is None:
            return "transformers: its weights or modules are not what they were when it was loaded"
        if isinstance(self.adapter.lean, FusedForward):
            return "fused"
        if not isinstance(backend, NativeBackend):
            return f"transformers: {backend_name(backend)} attends, which a lean pass does not ask"
        return "lean"

    @cached_property
    def controls(self) -> Mapping[int, str]:
        """Its control tokens as they are written, by id."""
        return control_tokens(self.tokenizer)

    @cached_property
    def shown(self) -> frozenset[str]:
        """Those of them that are read like words."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(text for number, text in self.controls.items() if not added[number].special)

    def __repr__(self) -> str:
        return f"LoadedModel({self.name}, {self.adapter.geometry.dtype} on {self.adapter.device})"

    @property
    def speaks_embedded(self) -> bool:
        """Whether it has the words of the embedded language: the model that ships, or one in its place."""
        return bool(vocabulary().items() <= self.tokenizer.get_vocab().items())

    @cached_property
    def grammars(self) -> Grammars:
        """Guides over its tokens: made when the first is asked for.

        Raises:
            InvalidRequestError: The extra `guided` is not installed, or its tokens cannot be guided; says why.
        """
        return Grammars(self.tokenizer, self.adapter.vocabulary_size, self.adapter.end_tokens)

    @cached_property
    def longest_text(self) -> int:
        """Characters of the longest text that is tokenized: as many for each position as the longest token has, or 64.

        Longer ones would keep a tokenizer busy for minutes, to be refused by what they come to.
        """
        return self.adapter.max_positions * max(_TOKEN_CHARACTERS, max(map(len, self.tokenizer.get_vocab()), default=0))

    def encode(self, text: str | PromptText) -> list[int]:
        """Token ids of a text; none are added. In a `str` control tokens count wherever they stand.

        Raises:
            ContextLengthError: It is so long that its tokens could not fit the model's context: see `longest_text`.
        """
        if len(text) > self.longest_text:
            raise ContextLengthError(
                f"a text of {len(text):,} characters cannot be read: the model's context ends at "
                f"{self.adapter.max_positions:,} tokens, for which {self.longest_text:,} characters are too many"
            )
        if isinstance(text, PromptText):
            return self.safe_tokenizer.encode(text)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes]:
        """Tells what a token writes, also where it is a part of a letter."""
        return token_bytes(self.tokenizer)

    def closes(self, token: int) -> bool:
        """Whether a token, as the last of an answer, says nothing but that its turn is over."""
        return token in self._closers

    @cached_property
    def _closers(self) -> frozenset[int]:
        closing = self.encode(PromptText.special(self.chat.turn_end))
        said = self.said_of(closing)
        calls = (self.encode(PromptText.special(end))[:1] for end in tools_format(self.chat).ends)
        return frozenset((*self.adapter.end_tokens, *closing[max(0, said - 1) : said], *chain.from_iterable(calls)))

    def opening(self, tokens: Sequence[int]) -> str:
        """What the turn that a message is starts with, before a name or a word.

        Of what is none, an assistant's, or a user's where that is nothing; empty if the template opens no turn.
        """
        roles: tuple[Role, ...] = ("assistant", "user", "system")
        starts = {role: self.encode(self.chat.start(role)) for role in roles}
        opened = [role for role in roles if starts[role]]
        begun = [role for role in opened if [*tokens[: len(starts[role])]] == starts[role]]
        found = max(begun, key=lambda role: len(starts[role]), default=opened[0] if opened else None)
        return "" if found is None else self.chat.start(found)

    def part_of(self, tokens: Sequence[int]) -> PromptText:
        """The words of a whole turn, an answer's with its speaker's name, as a part of a user's turn."""
        for form in (self.chat.assistant, self.chat.user):
            opening, closing = self.encode(form.plain.rstrip(" ")), self.encode(form.after)
            if [*tokens[: len(opening)]] == opening:
                ended = bool(closing) and [*tokens[-len(closing) :]] == closing
                words = tokens[len(opening) : len(tokens) - len(closing) if ended else None]
                return self.chat.part(self.decode([*words], special=False))
        return self.chat.part(self.decode([*tokens], special=False))

    def said_of(self, closing: Sequence[int]) -> int:
        """How many tokens of what closes a message tell that it is over: up to the first that is no blank, if any."""
        texts = (self.decode([token]) for token in closing)
        return next((number for number, text in enumerate(texts, start=1) if text.strip()), min(1, len(closing)))

    def decode(self, tokens: list[int], *, special: bool = True) -> str:
        """Text of token ids, with or without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def usual_device() -> str:
    """What `"auto"` is."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(device: str | torch.device) -> torch.device:
    """The device of that name, of `"auto"` the GPU if there is one; raises `InvalidRequestError` if it is no use."""
    try:
        found = torch.ones(1, device=torch.device(usual_device() if device == AUTO else device))
        assert found.item() == 1.0, "it does not keep what is written there"
    except Exception as error:  # backends that are not there raise what they like
        raise InvalidRequestError(
            f'device {str(device)!r} cannot be used: give "cpu", "cuda", "cuda:1" or "auto" ({first_line(error)})'
        ) from error
    return found.device


def opened(
    name: str | Path, device: str | torch.device, dtype: torch.dtype | None, *, weights: bool = True
) -> tuple[Checkpoint, torch.device]:
    """A model whose configuration says nothing against serving it, and where that is to be.

    Args:
        name: See `load_model`.
        device: See `load_model`.
        dtype: That was asked for; None: the usual one.
        weights: Whether its small files are not enough.

    Raises:
        What `load_model` does, before anything but small files is read.
    """
    source = WEIGHTS if str(name) == EMBEDDED else hub_path(name, weights=weights)
    # It is small enough to be faster on a CPU, and says the same on every machine.
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
        dtype: Of weights and KV, as torch or Hugging Face names it: `torch.bfloat16`, `"bfloat16"`, `"bf16"`; by
            default, or `"auto"`, the checkpoint's own, or fp32 on a CPU that has no kernels for it.
        prepacked: Lay large linear weights out for the CPU, where that takes no more memory than there is: about twice
            as fast. Pages of a file stay beside them; weights that have been converted do not.
        generation_config: `"auto"`: what the checkpoint's `generation_config.json` says about sampling is what calls do
            that do not say otherwise (`LoadedModel.sampling_defaults`); `"off"`: they take the likeliest token. End
            tokens are its own in both cases.
        backend: What will attend: the check is made with it.
        chat: Variables of the model's chat template by name, such as `enable_thinking`; and `date`, the day that it
            writes as today's.

    Raises:
        UnsupportedModelError: The architecture, its positions or its files cannot be served exactly; says why, before
            weights are read where the configuration tells.
        InvalidRequestError: The device or the backend cannot be used, or the model does not fit it.
        ModelNotFoundError: There is no such model, or the hub that may have it cannot be reached.
        OSError: Its files are damaged.
    """
    if not isinstance(name, str | Path):
        raise InvalidRequestError(f'a model is "embedded", a folder or a hub name, or was loaded before: not {name!r}')
    if chat is not None and not isinstance(chat, Mapping):
        raise InvalidRequestError(f'chat must be variables by name, as in {{"enable_thinking": True}}, not {chat!r}')
    require_backend(backend)
    dtype = dtype_named(dtype)
    if generation_config not in get_args(GenerationConfigUse):
        raise InvalidRequestError(f'generation_config must be "auto" or "off", not {generation_config!r}')
    checkpoint, device = opened(name, device, dtype)
    # What a few small files tell comes before gigabytes.
    tokenizer = checkpoint.tokenizer()
    turns, spelling = chat_format(tokenizer, chat), safe_tokenizer(tokenizer)
    checkpoint.generation()  # transformers would go without a damaged one, and without its stop tokens
    files = WeightFiles.of(checkpoint.folder())  # as they are before they are read
    with Alone():
        model = checkpoint.model(device, dtype)
        text = model.config.get_text_config()
        prompt = probe_prompt(model)
        attention = discover_attention(model, max_positions(text), prompt.tokens[0])
        adapter = ModelAdapter(model, attention, files, tokenizer.eos_token_id)
        served = _backend(adapter, backend)
        probe = require_movable(adapter, prompt, served)
    packed = prepack(model, replacing=True) if prepacked else 0
    modelling = _lean(adapter, prompt, served, packed=packed) if prepacked else "its weights are not to be laid out"
    exact_with = {backend if isinstance(backend, str) else id(backend): served}
    said = {} if model.generation_config is None or generation_config == "off" else model.generation_config.to_dict()
    defaults = checkpoint_sampling(said)
    told = (packed, exact_with, defaults, None, modelling)
    loaded = LoadedModel(str(name), adapter, tokenizer, turns, spelling, probe, prompt, *told)
    computes = loaded.computed_with(served)
    why = why_not_faster(served)
    logging.getLogger(__name__).info(
        "%s: %s attends%s, computed by %s", name, backend_name(served), why and f" ({why})", computes
    )
    return loaded


def _lean(adapter: ModelAdapter, prompt: ProbePrompt, served: AttentionBackend, *, packed: int) -> str | None:
    """Let a model's lean pass serve it, if it can be had and is right; why not."""
    make: Callable[[Any, HeadShape], LeanForward | FusedForward] = fused_forward
    if adapter.device.type != "cuda" and not isinstance(served, TritonBackend):
        if not packed and adapter.parameters > _SMALL:
            return "its weights are not laid out for the CPU"
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
        return f"it is built otherwise than its modules say: {error}"
    return None


def _backend(adapter: ModelAdapter, wanted: BackendName | AttentionBackend) -> AttentionBackend:
    return make_backend(wanted, adapter.geometry.dtype, adapter.device, _heads(adapter))


def _heads(adapter: ModelAdapter) -> HeadShape:
    return HeadShape(adapter.heads, adapter.geometry.kv_heads, adapter.geometry.head_dim)
