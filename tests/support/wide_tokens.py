"""A vocabulary as large as those of real models, of words that nobody has counted."""

from __future__ import annotations

import json
import random
import string

_SPACE = "Ġ"
"""A blank, as byte-level tokenizers write it."""


class WideTokenizer:
    """As much of a Hugging Face tokenizer as constraints are made of: all bytes, and random words, half of them behind
    a blank.

    Args:
        words: Of the vocabulary.
    """

    def __init__(self, words: int) -> None:
        draw = random.Random(0)
        letters = [letter for letter in string.printable if letter in string.ascii_letters + string.digits]
        tokens = dict.fromkeys([_byte(byte) for byte in range(256)])
        while len(tokens) < words - 1:
            word = "".join(draw.choice(letters) for _ in range(draw.randint(2, 9)))
            tokens[draw.choice(("", _SPACE)) + word] = None
        self.end = words - 1
        self._ids = {token: number for number, token in enumerate([*tokens][: words - 1])}
        self.backend_tokenizer = self

    def __len__(self) -> int:
        return self.end + 1

    def encode(self, text: str) -> list[int]:
        """Byte by byte."""
        return [self._ids[_byte(byte)] for byte in text.encode()]

    def to_str(self) -> str:
        """As the `tokenizers` library writes one."""
        end = {"id": self.end, "content": "</s>", "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        blank = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        level = {"type": "ByteLevel", **blank}
        model = {"type": "BPE", "vocab": self._ids, "merges": []}
        return json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{**end, **flags}],
                "pre_tokenizer": level,
                "decoder": level,
                "model": model,
            }
        )


def _byte(byte: int) -> str:
    """A byte as byte-level tokenizers write it: itself, if it can be seen, else behind the first 256 letters."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in seen]
    return chr(byte) if byte in seen else chr(256 + hidden.index(byte))
