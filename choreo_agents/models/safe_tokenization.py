"""Framed text as tokens: a tokenizer's control tokens come of frames, and never of words.

Tokenizers find their added tokens in a text wherever they stand. So the frames are told apart instead: in a copy of the
tokenizer every added token has another name, which nobody can guess, and frames are given to the copy with these names
in the place of control tokens. All else goes as before: words beside a frame are tokenized as the whole text would be.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from choreo_agents.errors import UnsupportedModelError
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase

_FRAMES_KEPT = 512
_LONGEST_KEPT = 1024
"""Characters: longer ones hold what somebody has said, and do not come again."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class SafeTokenizer(Protocol):
    """How one tokenizer writes framed text."""

    def encode(self, text: PromptText, /) -> list[int]:
        """Token ids; none are added. A control token comes of each that stands in a frame, and of no words."""
        ...


def safe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> SafeTokenizer:
    """The spelling of a Hugging Face tokenizer.

    Raises:
        UnsupportedModelError: It is of a kind that does not keep text apart from control tokens.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - takes long, as transformers do
    from transformers import PreTrainedTokenizer  # noqa: PLC0415

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        return RustSafeTokenizer(backend)
    if isinstance(tokenizer, PreTrainedTokenizer):
        return PythonSafeTokenizer(tokenizer)
    raise UnsupportedModelError(
        f"tokenizer {type(tokenizer).__name__} does not say which of its tokens control tokens are, so that text could "
        "become some: save the model with a tokenizer.json"
    )


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens of a tokenizer that come of frames alone, by id."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {number: token.content for number, token in added.items() if is_control_text(token.content)}


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bytes]:
    """What tells the bytes that a token writes, a part of a letter among them: the vocabulary has them, no text has."""
    own: Callable[[int], bytes] | None = getattr(tokenizer, "bytes_of", None)
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
    letters = _byte_letters() if b'"ByteLevel"' in decoder else {}
    blank = "\u2581" if "\u2581".encode() in decoder else " "

    def written(token: int) -> bytes:
        if token in added:
            return str(added[token].content).encode()
        if own is not None and (found := own(token)):
            return found
        piece = None if own is not None else tokenizer.convert_ids_to_tokens(token)
        if piece is None or not (letters or blank != " "):
            return str(tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode(errors="replace")
        if letters:
            return bytes(byte for letter in piece for byte in letters.get(letter, letter.encode()))
        return bytes([int(piece[3:5], 16)]) if _BYTE.fullmatch(piece) else piece.replace(blank, " ").encode()

    return written


def _byte_letters() -> dict[str, bytes]:
    """The letter that byte-level vocabularies write for each byte: itself if it is seen, else one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)}
    others = (byte for byte in range(256) if byte not in seen)
    moved = {byte: 256 + place for place, byte in enumerate(others)}
    return {chr(moved.get(byte, byte)): bytes([byte]) for byte in range(256)}


class RustSafeTokenizer:
    """Of a tokenizer of the `tokenizers` library, also of one whose model knows control tokens as words.

    Args:
        tokenizer: Stays as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415

        written = json.loads(tokenizer.to_str())
        controls = [token for token in written["added_tokens"] if is_control_text(token["content"])]
        self._controls = _any_of({token["content"]: token["single_word"] for token in controls})
        secret = "".join(secrets.choice(string.ascii_lowercase) for _ in range(32))
        self._names = {token["content"]: f"{secret}{_letters(at)}" for at, token in enumerate(controls)}
        numbers = {token["content"]: token["id"] for token in written["added_tokens"]}
        for token in controls:
            # Whether it stands alone is seen in its frame: what words follow must not decide it.
            token |= {"content": self._names[token["content"]], "single_word": False}
        written |= {"truncation": None, "padding": None, "post_processor": None}
        known = self._names
        if written["model"].get("byte_fallback"):
            # By these names the model finds what it writes for letters that it does not know.
            known = {text: name for text, name in known.items() if not _BYTE.fullmatch(text)}
        _rename(written["model"], known)
        self._tokenizer = Tokenizer.from_str(json.dumps(written))
        found = {self._tokenizer.token_to_id(self._names.get(text, text)): own for text, own in numbers.items()}
        self._numbers = {renamed: own for renamed, own in found.items() if renamed != own}
        """Ids of added tokens that the copy counts otherwise."""
        self._named = lru_cache(_FRAMES_KEPT)(self._name_all)

    def encode(self, text: PromptText) -> list[int]:
        """See `SafeTokenizer`."""
        whole = "".join(self._framed(part) if is_frame else part for part, is_frame in text.parts)
        ids: list[int] = self._tokenizer.encode(whole, add_special_tokens=False).ids
        return [self._numbers.get(each, each) for each in ids] if self._numbers else ids

    def _framed(self, frame: str) -> str:
        return self._named(frame) if len(frame) <= _LONGEST_KEPT else self._name_all(frame)

    def _name_all(self, frame: str) -> str:
        return self._controls.sub(lambda found: self._names[found[0]], frame)


class PythonSafeTokenizer:
    """Of a tokenizer that is written in Python.

    Args:
        tokenizer: Stays as it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._added = {token.content: token for token in added if is_control_text(token.content)}
        self._controls = _any_of({text: token.single_word for text, token in self._added.items()})
        self._blanks = _any_of({token.content: False for token in added if not is_control_text(token.content)})

    def encode(self, text: PromptText) -> list[int]:
        """See `SafeTokenizer`."""
        runs: list[tuple[str, bool]] = []
        for run, is_control in text.runs(self._controls):
            runs += [(run, True)] if is_control else PromptText.special(run).runs(self._blanks)
        tokens: list[int] = []
        for at, (run, is_added) in enumerate(runs):
            before, after = (self._added.get(beside) for beside in (_at(runs, at - 1), _at(runs, at + 1)))
            # As the tokenizer does it: blanks beside such a token are part of it.
            bare = run.lstrip() if before is not None and before.rstrip else run
            bare = bare.rstrip() if after is not None and after.lstrip else bare
            tokens += [self._number(run)] if is_added and bare else self._spelled(bare)
        return tokens

    def _spelled(self, words: str) -> list[int]:
        return [
            number
            for token in self._tokenizer.tokenize(words, split_special_tokens=True)
            for number in (map(self._letter, token) if self._is_known(token) else [self._number(token)])
        ]

    def _is_known(self, token: str) -> bool:
        """Whether the tokenizer's own vocabulary has written a control token for words."""
        return token in self._added and token != self._tokenizer.unk_token

    def _letter(self, letter: str) -> int:
        return self._number(letter) if letter not in self._added else int(self._tokenizer.unk_token_id or 0)

    def _number(self, token: str) -> int:
        number: Any = self._tokenizer.convert_tokens_to_ids(token)
        return int(number)


def _at(runs: list[tuple[str, bool]], at: int) -> str:
    """The added token that stands there; nothing where none does."""
    return runs[at][0] if 0 <= at < len(runs) and runs[at][1] else ""


def is_control_text(content: str) -> bool:
    """Whether an added token can tell a model anything: runs of blanks are text like any other."""
    return bool(content.strip().strip("▁"))


def _any_of(contents: Mapping[str, bool]) -> re.Pattern[str]:
    """Finds the longest of these texts; only as words of their own if that is said of them."""
    longest_first = sorted(contents, key=len, reverse=True)
    ways = [rf"(?<!\w){re.escape(text)}(?!\w)" if contents[text] else re.escape(text) for text in longest_first]
    return re.compile("|".join(ways) or r"(?!)")


def _letters(number: int) -> str:
    """A number in four letters."""
    return "".join(string.ascii_lowercase[number // 26**place % 26] for place in range(4))


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give what a model of the `tokenizers` library knows under these names others, so that no text spells it."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _spells(pair, names)]


def _spells(merge: str | Iterable[str], names: Mapping[str, str]) -> bool:
    """Whether a merge makes a control token of text, or takes one for text."""
    one, other = merge.split(" ", 1) if isinstance(merge, str) else merge
    return one in names or other in names or one + other in names
