"""Tokenizes `PromptText`: control tokens come from special parts only, never from plain ones.

Tokenizers find added tokens anywhere in a text. So a copy of the tokenizer renames every added token to a secret name,
and special parts are given to the copy with these names in place of the control tokens. All else is unchanged: plain
text beside a special part is tokenized as in one text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from choreo_agents.errors import UnsupportedModelError
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x[0-9A-F]{2}>")


class SafeTokenizer(Protocol):
    """A tokenizer of `PromptText`."""

    def encode(self, text: PromptText, /) -> list[int]:
        """Return token ids, none added; control tokens come from special parts only."""
        ...


def safe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> SafeTokenizer:
    """Return a safe tokenizer over a Hugging Face tokenizer.

    Raises:
        UnsupportedModelError: Its kind cannot keep text apart from control tokens.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - slow to import, like transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        return RustSafeTokenizer(backend)
    raise UnsupportedModelError(
        f"tokenizer {type(tokenizer).__name__} does not list its control tokens, so that text could become some: save "
        "the model with a tokenizer.json"
    )


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the text of each control token of a tokenizer, by id."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {number: token.content for number, token in added.items() if is_control_text(token.content)}


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bytes]:
    """Return a function from a token to its bytes, read from the vocabulary: a token may be part of a character."""
    own: Callable[[int], bytes] | None = getattr(tokenizer, "bytes_of", None)
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
    letters = {}
    if b'"ByteLevel"' in decoder:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415 - the tokenizer has

        letters = {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}
    blank = "\u2581" if "\u2581".encode() in decoder else " "

    def written(token: int) -> bytes:
        if token in added:
            return str(added[token].content).encode()
        if own is not None and (data := own(token)):
            return data
        piece = None if own is not None else tokenizer.convert_ids_to_tokens(token)
        if piece is None or not (letters or blank != " "):
            return str(tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode(errors="replace")
        if letters:
            return bytes(byte for letter in piece for byte in letters.get(letter, letter.encode()))
        return bytes([int(piece[3:5], 16)]) if _BYTE.fullmatch(piece) else piece.replace(blank, " ").encode()

    return written


class RustSafeTokenizer:
    """A safe tokenizer over one of the `tokenizers` library, even if its vocabulary contains control tokens.

    Args:
        tokenizer: Is not changed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415

        written = json.loads(tokenizer.to_str())
        controls = [token for token in written["added_tokens"] if is_control_text(token["content"])]
        self._controls = _pattern_of({token["content"]: token["single_word"] for token in controls})
        secret = "".join(secrets.choice(string.ascii_lowercase) for _ in range(32))
        self._names = {token["content"]: f"{secret}{_to_letters(at)}" for at, token in enumerate(controls)}
        numbers = {token["content"]: token["id"] for token in written["added_tokens"]}
        for token in controls:
            # `_controls` checks `single_word` within the special part: the plain text that follows must not decide it.
            token |= {"content": self._names[token["content"]], "single_word": False}
        written |= {"truncation": None, "padding": None, "post_processor": None}
        renames = self._names
        if written["model"].get("byte_fallback"):
            # Keep byte tokens: the model finds them by name for characters that it does not know.
            renames = {text: name for text, name in renames.items() if not _BYTE.fullmatch(text)}
        _rename(written["model"], renames)
        self._tokenizer = Tokenizer.from_str(json.dumps(written))
        ids_in_copy = {self._tokenizer.token_to_id(self._names.get(text, text)): own for text, own in numbers.items()}
        self._numbers = {renamed: own for renamed, own in ids_in_copy.items() if renamed != own}
        """Original ids of added tokens, by their id in the copy, where they differ."""

    def encode(self, text: PromptText) -> list[int]:
        """See `SafeTokenizer`."""
        whole = "".join(self._rename_controls(part) if is_special else part for part, is_special in text.parts)
        ids: list[int] = self._tokenizer.encode(whole, add_special_tokens=False).ids
        return [self._numbers.get(token, token) for token in ids] if self._numbers else ids

    def _rename_controls(self, text: str) -> str:
        return self._controls.sub(lambda match: self._names[match[0]], text)


def is_control_text(content: str) -> bool:
    """Return whether an added token is a control token: runs of blanks are ordinary text."""
    return bool(content.strip().strip("▁"))


def _pattern_of(contents: Mapping[str, bool]) -> re.Pattern[str]:
    """Compile a pattern of the longest of these texts; those that map to True match whole words only."""
    longest_first = sorted(contents, key=len, reverse=True)
    patterns = [rf"(?<!\w){re.escape(text)}(?!\w)" if contents[text] else re.escape(text) for text in longest_first]
    return re.compile("|".join(patterns) or r"(?!)")


def _to_letters(number: int) -> str:
    """Return a number in four letters."""
    return "".join(string.ascii_lowercase[number // 26**place % 26] for place in range(4))


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in a model of the `tokenizers` library, so that no text produces them."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _involves_control(pair, names)]


def _involves_control(merge: str | Iterable[str], names: Mapping[str, str]) -> bool:
    """Return whether a BPE merge makes a control token, or uses one."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first in names or second in names or first + second in names
