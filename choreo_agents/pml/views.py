"""Prompts that are encoded: modules where the library has them, and the rest encoded for the prompt alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from choreo_agents.engine import Decode, Engine
from choreo_agents.engine.transfer.facade import Leases
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat
from choreo_agents.pml.assembling import Assembly
from choreo_agents.sampling import Sampling


@dataclass
class PromptView:
    """A prompt that is encoded: `engine.decode([view.call()])` answers it.

    Its leases end with the `engine.scope()` that it was made in, with `release`, or with its block:
    `with library.assemble(prompt) as view`.
    """

    chat: ChatFormat
    end: int
    """The position where an answer starts."""
    cached_tokens: int
    """Of modules, each encoded once, ..."""
    fresh_tokens: int
    """... and of arguments, of modules that are not cached, and of the prompt's own text."""
    leases: Leases
    placed: list[tuple[int, MessageHandle]]
    """What an answer attends to, with the position where it appears: in the order of positions."""

    @property
    def handles(self) -> list[MessageHandle]:
        """What an answer attends to, in the order of positions."""
        return [handle for _, handle in self.placed]

    @property
    def offsets(self) -> list[int | None]:
        """Where each of these appears."""
        return [offset for offset, _ in self.placed]

    def call(self, sampling: Sampling | None = None, **options: Any) -> Decode:
        """What answers it as the assistant; options are those of `engine.decode`: `author` names the speaker."""
        # A header that opens thoughts is for calls that tell them from the answer: else readers would be given both.
        opening = self.chat.header(options.get("author"), thinking=options.get("thinking") is not None)
        usual: dict[str, Any] = {"header": opening, "closing": self.chat.turn_end, "sampling": sampling or Sampling()}
        seen = {"parents": self.handles, "offsets": self.offsets, "new_offset": self.end}
        return Decode(**(usual | seen | options))

    def release(self) -> None:
        """Give the leases back; once."""
        self.leases.release()

    def __enter__(self) -> PromptView:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def encoded_view(engine: Engine, assembly: Assembly, modules: Mapping[str, MessageHandle], *, lazy: bool) -> PromptView:
    """The view of a prompt, with what modules do not hold encoded: each text with all before it in sight.

    Args:
        engine: Has the modules, and encodes the rest.
        assembly: The prompt.
        modules: Their handles by piece key.
        lazy: In the step of the answer that reads it, instead of now.
    """
    placed = [(piece.start, modules[piece.key]) for piece in assembly.cached]
    leases = engine.kv.lease([handle for _, handle in placed])
    view = PromptView(engine.chat, assembly.end, assembly.cached_tokens, assembly.fresh_tokens, leases, placed)
    try:
        for text in assembly.fresh:
            offsets = [offset for offset, _ in view.placed if offset < text.offset]
            own: Any = {"author": "/".join(text.module) or None, "role": text.role, "confidential": text.confidential}
            seen = (view.handles[: len(offsets)], offsets, text.offset)
            handle = engine.prefill(text.tokens, *seen, lazy=lazy, **own)
            leases.add([handle])
            view.placed.insert(len(offsets), (text.offset, handle))
    except BaseException:
        view.release()
        raise
    return view
