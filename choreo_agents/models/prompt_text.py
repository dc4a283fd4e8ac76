"""Text in special and plain parts: control tokens count only in special ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class PromptText:
    """Text of a prompt: special parts, which a chat format writes, and plain parts, which may come from any user.

    `PromptText.special("<|user|>") + PromptText.plain(text) + PromptText.special("<|end|>")` has two control tokens,
    whatever `text` contains. Adjacent parts are tokenized together, as one text.
    """

    parts: tuple[tuple[str, bool], ...] = ()
    """Non-empty texts, each with whether it is special; kinds alternate."""

    @classmethod
    def special(cls, text: str) -> PromptText:
        """Make a text in which control tokens count."""
        return cls(((text, True),) if text else ())

    @classmethod
    def plain(cls, text: str) -> PromptText:
        """Make a text without control tokens, whatever it looks like."""
        return cls(((text, False),) if text else ())

    @classmethod
    def joined(cls, texts: Iterable[PromptText]) -> PromptText:
        """Concatenate texts in linear time; repeated `+` is quadratic."""
        parts = (part for text in texts for part in text.parts if part[0])
        runs = groupby(parts, key=lambda part: part[1])  # adjacent parts of one kind
        return cls(tuple(("".join(words for words, _ in run), is_special) for is_special, run in runs))

    @classmethod
    def filled(cls, template: str, values: Mapping[str, str]) -> PromptText:
        """Fill placeholders of a special text with plain values."""
        parts = re.split(f"({'|'.join(map(re.escape, values))})", template) if values else [template]
        return cls.joined(cls.plain(values[part]) if part in values else cls.special(part) for part in parts)

    @property
    def text(self) -> str:
        """All parts as one string."""
        return "".join(text for text, _ in self.parts)

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return sum(len(text) for text, _ in self.parts)

    def __add__(self, other: PromptText) -> PromptText:
        if not isinstance(other, PromptText):
            return NotImplemented
        return PromptText.joined([self, other])

    def rstrip(self, characters: str) -> PromptText:
        """Return it without these characters at its end."""
        parts = [*self.parts]
        while parts:
            text, is_special = parts.pop()
            if bare := text.rstrip(characters):
                return PromptText((*parts, (bare, is_special)))
        return PromptText()

    def removeprefix(self, prefix: str) -> PromptText:
        """Return it without a prefix, if it starts with it."""
        if not self.text.startswith(prefix):
            return self
        parts, remaining = [], len(prefix)
        for text, is_special in self.parts:
            parts.append((text[remaining:], is_special))
            remaining = max(0, remaining - len(text))
        return PromptText(tuple(part for part in parts if part[0]))

    def runs(self, controls: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
        """Yield its control tokens and the texts between them, each with whether it is a control token.

        Args:
            controls: Pattern of control tokens, searched in special parts.
        """
        between = ""
        for text, is_special in self.parts:
            start = 0
            for match in controls.finditer(text) if is_special else ():
                between += text[start : match.start()]
                if between:
                    yield between, False
                yield match[0], True
                between, start = "", match.end()
            between += text[start:]
        if between:
            yield between, False
