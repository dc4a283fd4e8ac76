"""Text that says which of it is frame and which is words: only in frames there are control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class PromptText:
    """Frames, which a chat format or a program writes, and words, which anybody may have written.

    `PromptText.frame("<|user|>") + PromptText.words(said) + PromptText.frame("<|end|>")`: two control tokens come of
    it, whatever was said. What stands next to each other is tokenized together, as one text would be.
    """

    parts: tuple[tuple[str, bool], ...] = ()
    """Texts, none of them empty, and whether each is a frame; no two of a kind stand next to each other."""

    @classmethod
    def special(cls, text: str) -> PromptText:
        """Text in which control tokens count."""
        return cls(((text, True),) if text else ())

    @classmethod
    def plain(cls, text: str) -> PromptText:
        """Text in which nothing is a control token."""
        return cls(((text, False),) if text else ())

    @classmethod
    def joined(cls, texts: Iterable[PromptText]) -> PromptText:
        """Texts one after the other, each read once: adding them up would read the first of them again and again."""
        return cls(tuple(_joined([part for text in texts for part in text.parts])))

    @classmethod
    def filled(cls, frame: str, words: Mapping[str, str]) -> PromptText:
        """A frame in which words stand in the place of their marks."""
        parts = re.split(f"({'|'.join(map(re.escape, words))})", frame) if words else [frame]
        return cls.joined(cls.plain(words[part]) if part in words else cls.special(part) for part in parts)

    @property
    def text(self) -> str:
        """All of it, as it is read."""
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
        """The same without these characters at its end."""
        parts = [*self.parts]
        while parts:
            text, is_frame = parts.pop()
            if bare := text.rstrip(characters):
                return PromptText((*parts, (bare, is_frame)))
        return PromptText()

    def removeprefix(self, prefix: str) -> PromptText:
        """The same without this text at its start, if it starts with it."""
        if not self.text.startswith(prefix):
            return self
        parts, left = [], len(prefix)
        for text, is_frame in self.parts:
            parts.append((text[left:], is_frame))
            left = max(0, left - len(text))
        return PromptText(tuple(part for part in parts if part[0]))

    def runs(self, controls: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
        """Its control tokens, and the texts between them; and whether each is a control token.

        Args:
            controls: What is one in a frame.
        """
        between = ""
        for text, is_frame in self.parts:
            done = 0
            for found in controls.finditer(text) if is_frame else ():
                between += text[done : found.start()]
                if between:
                    yield between, False
                yield found[0], True
                between, done = "", found.end()
            between += text[done:]
        if between:
            yield between, False


def _joined(parts: list[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Texts of one kind that stand next to each other as one."""
    for kind, together in groupby((part for part in parts if part[0]), key=lambda part: part[1]):
        yield "".join(text for text, _ in together), kind
