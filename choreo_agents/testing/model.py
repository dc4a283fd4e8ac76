"""A model that computes nothing, and its tokenizer, so that tests run the real engine at a few numbers a token."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.errors import AdapterError, ConstraintError
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.models import ChatFormat, LoadedModel, PromptText
from choreo_agents.models.chat.format import ThoughtsFormat, TurnFormat
from choreo_agents.models.support import MovedLogits, ProbePrompt
from choreo_agents.sampling import SampledToken, Sampler, SamplerCall, ThinkingConstraint

if TYPE_CHECKING:
    from choreo_agents.attention.step import Attention
    from choreo_agents.models import ModelAdapter
    from choreo_agents.models.lora import Adapted

LONGEST = 6
"""Bytes of a piece: most words are one token or two, as with trained tokenizers. Token ids stay exact in JSON
numbers."""
BOS, END, ROLES = "<s>", "<|end|>", ("system", "user", "assistant")
THINK, THOUGHT = "<think>", "</think>"
"""Tags around thoughts."""
SPECIAL_TOKENS = (BOS, END, *(f"<|{role}|>" for role in ROLES), THINK, THOUGHT)
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
_WORDS = re.compile(r" ?\w+|\W")


class ScriptedTokenizer:
    """Tokenizer with the part of Hugging Face's interface that the engine uses; also encodes `PromptText`.

    Any text that UTF-8 can write comes back as it was.

    token   0 .. 6           the special tokens
            0x01 b1 .. b6    a piece of one to six bytes, behind a byte that tells its length
    """

    size = 2 << 8 * LONGEST
    """Exclusive upper bound of all token ids."""
    bos_token_id, end_token_id, thought_token_id = (SPECIAL_TOKENS.index(token) for token in (BOS, END, THOUGHT))
    unk_token_id = pad_token_id = None

    def encode(self, text: str | PromptText, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text, special tokens included; of a `PromptText`, only its special parts may have
        them."""
        framed, index_of = PromptText.special(text) if isinstance(text, str) else text, SPECIAL_TOKENS.index
        runs = framed.runs(_SPECIAL)
        return [token for run, special in runs for token in ([index_of(run)] if special else self.spell(run))]

    def spell(self, text: str) -> Iterator[int]:
        """Yield the token ids of plain text: what looks like a special token is encoded as text."""
        for word in _WORDS.findall(text):
            written = word.encode()
            for at in range(0, len(written), LONGEST):
                yield int.from_bytes(b"\1" + written[at : at + LONGEST])

    def decode(
        self, tokens: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Return the text of token ids."""
        written = b"".join(self._written(token, special=not skip_special_tokens) for token in tokens)
        return written.decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for; none for a special token."""
        return self._written(token, special=False)

    def get_vocab(self) -> dict[str, int]:
        """Return the special tokens, the only ones that are not encoded as their own bytes."""
        return {token: i for i, token in enumerate(SPECIAL_TOKENS)}

    def _written(self, token: int, *, special: bool) -> bytes:
        if token < len(SPECIAL_TOKENS):
            return SPECIAL_TOKENS[token].encode() if special else b""
        return token.to_bytes(LONGEST + 1).lstrip(b"\0")[1:]


NAME = "scripted"
_GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=16, dtype=torch.float32)
_DISTINCT = 1021
"""Number of tokens with distinct keys and values."""
_FINGERPRINT = hashlib.sha256(f"{NAME} {ScriptedTokenizer.size} {_GEOMETRY} {_DISTINCT}".encode()).hexdigest()[:16]


class ScriptedAdapter:
    """Model adapter whose forward pass stores and attends as the engine asks, and whose logits are zeros.

    Args:
        context: Length of its context in tokens.
    """

    def __init__(self, context: int) -> None:
        self.max_positions = context
        self.device = torch.device("cpu")
        self.geometry = _GEOMETRY
        self.kinds = (AttentionKind(),)
        self.heads = _GEOMETRY.kv_heads
        self.parameters = 0
        self.vocabulary_size = ScriptedTokenizer.size
        self.end_tokens = (ScriptedTokenizer.end_token_id,)
        self.fingerprint = self.weights = _FINGERPRINT

    def read_adapter(self, folder: Path) -> NoReturn:
        """Raise `AdapterError`: a script has no weights that could be adapted."""
        raise AdapterError(f"a script has no weights, and cannot load the adapter in {str(folder)!r}: leave it out")

    @torch.inference_mode()
    def logits(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        attention: Attention,
        wanted: Sequence[int],
        adapted: Sequence[Adapted] = (),
    ) -> Tensor:
        """Store keys and values that tell tokens apart; return zeros, [len(wanted), 1]: the sampler knows the
        tokens."""
        values = torch.tensor([token % _DISTINCT / _DISTINCT for token in tokens])
        query = values[:, None, None].expand(-1, 1, _GEOMETRY.head_dim)
        attention.attend(0, query, query.transpose(0, 1), query.transpose(0, 1), 1.0)
        return torch.zeros(len(wanted), 1)


class ScriptedSampler:
    """Sampler that returns given tokens, and then end tokens for as long as it is called.

    Args:
        call: The decode that it samples for.
        tokens: Tokens of the decode, which must be allowed (see `generated`).
        unsaid: Called if the decode ends before its first token.
    """

    def __init__(self, call: SamplerCall, tokens: Iterable[int], unsaid: Callable[[], None]) -> None:
        self.constraint = None if call.constraint is None else call.constraint()
        self._call = call
        self._tokens = chain(tokens, repeat(ScriptedTokenizer.end_token_id))
        self._unsaid: Callable[[], None] | None = unsaid
        self._next: int | None = None
        """Token that was chosen and not taken yet."""

    def choose(self, logits: Tensor) -> SampledToken:
        """Return the next token, with probability 1."""
        token = self._next
        if token is None:
            if self._call.logits_callback is not None:
                self._call.logits_callback(logits)
            self._unsaid = None
            token = self._next = next(self._tokens)
        most = self._call.sampling.logprobs
        return SampledToken(token) if most is None else SampledToken(token, 0.0, ((token, 0.0),)[:most])

    def take(self, token: int) -> None:
        """Advance past the token."""
        self._next = None
        if self.constraint is not None:
            self.constraint.take(token)

    def withdraw(self) -> None:
        """See `Sampler`."""
        unsaid, self._unsaid = self._unsaid, None
        if unsaid is not None:
            unsaid()


def generated(call: SamplerCall, tokens: Iterable[int], thoughts: Iterable[int] = ()) -> list[int] | None:
    """Return all tokens of a decode that answers with these; None if its constraint does not allow them.

    Args:
        call: The decode.
        tokens: Tokens of the answer; end tokens follow.
        thoughts: Tokens of its thoughts, if the decode thinks: as many as the constraint allows.
    """
    if call.constraint is None:
        return [*tokens]
    constraint, made = call.constraint(), list[int]()
    answer = chain(tokens, repeat(ScriptedTokenizer.end_token_id))
    thinking = chain(thoughts, repeat(ScriptedTokenizer.thought_token_id))
    while not constraint.done:
        if not isinstance(constraint, ThinkingConstraint) or constraint.answers:
            token = next(answer)
        else:
            due = constraint.allowed()
            token = next(thinking) if due is None else int(due[0])
        if constraint.refuses(token) or not constraint.permits(token):
            return None
        try:
            constraint.take(token)
        except ConstraintError:
            return None
        made.append(token)
    return made


def scripted_model(sampler: Callable[[SamplerCall], Sampler], context: int) -> LoadedModel:
    """Return a model whose decodes generate what a sampler chooses.

    Args:
        sampler: See `LoadedModel.sampler`.
        context: Length of its context in tokens.
    """
    system, user, assistant = (TurnFormat(f"<|{role}|> ", None, END) for role in ROLES)
    # Thinking is off by default: a script consists of what agents say.
    thoughts = ThoughtsFormat(f"{assistant.plain}{THINK}", THOUGHT, assistant.plain, usual=False, kept=False)
    probed = [*ScriptedTokenizer().spell("no two of these")]
    return LoadedModel(
        NAME,
        cast("ModelAdapter", ScriptedAdapter(context)),
        cast("Any", ScriptedTokenizer()),
        ChatFormat(BOS, system, user, assistant, later=system, thoughts=thoughts),
        ScriptedTokenizer(),
        MovedLogits(error=0.0, tolerance=0.0),
        ProbePrompt(probed, torch.zeros(len(probed), 1)),
        fallback_reason="a script says what it says",
        sampler=sampler,
    )
