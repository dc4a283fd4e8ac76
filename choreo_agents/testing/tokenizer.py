"""A tokenizer without files: pieces of words are tokens, and a piece is its own number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from choreo_agents.models import FramedText

LONGEST = 6
"""Bytes of a piece: most words are one token or two, as with tokenizers that were trained. Their numbers stay exact in
JSON wherever it is read."""
BOS, END, ROLES = "<s>", "<|end|>", ("system", "user", "assistant")
THINK, THOUGHT = "<think>", "</think>"
"""What thoughts begin and end with."""
SPECIAL_TOKENS = (BOS, END, *(f"<|{role}|>" for role in ROLES), THINK, THOUGHT)
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
_WORDS = re.compile(r" ?\w+|\W")


class ScriptedTokenizer:
    """As much of a Hugging Face tokenizer as the engine uses, and a spelling of framed text in its tokens.

    Any text that UTF-8 can write comes back as it was.

    token   0 .. 6           the special tokens
            0x01 b1 .. b6    a piece of one to six bytes, behind a byte that tells its length
    """

    size = 2 << 8 * LONGEST
    """All token ids are smaller."""
    bos_token_id, end_token_id, thought_token_id = (SPECIAL_TOKENS.index(token) for token in (BOS, END, THOUGHT))
    unk_token_id = pad_token_id = None

    def encode(self, text: str | FramedText, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text in which special tokens may stand; of framed text, in frames only."""
        framed, known = FramedText.frame(text) if isinstance(text, str) else text, SPECIAL_TOKENS.index
        runs = framed.runs(_SPECIAL)
        return [token for run, special in runs for token in ([known(run)] if special else self.spell(run))]

    def spell(self, words: str) -> Iterator[int]:
        """Token ids of words alone: what looks like a special token is none."""
        for word in _WORDS.findall(words):
            written = word.encode()
            for at in range(0, len(written), LONGEST):
                yield int.from_bytes(b"\1" + written[at : at + LONGEST])

    def decode(
        self, tokens: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of token ids."""
        written = b"".join(self._written(token, special=not skip_special_tokens) for token in tokens)
        return written.decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """What a token writes; nothing for a special one."""
        return self._written(token, special=False)

    def get_vocab(self) -> dict[str, int]:
        """The tokens that are not made of their own bytes."""
        return {token: i for i, token in enumerate(SPECIAL_TOKENS)}

    def _written(self, token: int, *, special: bool) -> bytes:
        if token < len(SPECIAL_TOKENS):
            return SPECIAL_TOKENS[token].encode() if special else b""
        return token.to_bytes(LONGEST + 1).lstrip(b"\0")[1:]
