"""Prompts that are encoded: modules where the library has them, and the rest encoded for the prompt alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from choreo_agents.engine import Engine, Prefill
from choreo_agents.engine.transfer.leases import Leases
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.pml.assembling import Assembly, FreshText


@dataclass
class PromptView:
    """A prompt that is encoded: `engine.decode(header, view.handles, view.offsets, view.end)` answers it.

    Its leases end with the `engine.scope()` that it was made in, with `release`, or with its block:
    `with library.assemble(prompt) as view`.
    """

    end: int
    """The position where an answer starts."""
    cached_tokens: int
    """Of modules, each encoded once, ..."""
    fresh_tokens: int
    """... and of arguments, of modules that are not cached, and of the prompt's own text."""
    leases: Leases
    placed: list[tuple[int, MessageHandle]] = field(default_factory=list)
    """What an answer attends to, with the position where it appears: in the order of positions."""

    @property
    def handles(self) -> list[MessageHandle]:
        """What an answer attends to, in the order of positions."""
        return [handle for _, handle in self.placed]

    @property
    def offsets(self) -> list[int | None]:
        """Where each of these appears."""
        return [offset for offset, _ in self.placed]

    def release(self) -> None:
        """Give the leases back; once."""
        self.leases.release()

    def __enter__(self) -> PromptView:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def begin_view(engine: Engine, assembly: Assembly, modules: Mapping[str, MessageHandle]) -> PromptView:
    """A view of a prompt's modules, each leased for it, without the tokens that are yet to be encoded.

    Args:
        engine: Has the modules.
        assembly: The prompt.
        modules: Their handles by piece key.
    """
    placed = [(piece.offset, modules[piece.key]) for piece in assembly.cached]
    leases = engine.kv.lease([handle for _, handle in placed])
    return PromptView(assembly.end, assembly.cached_tokens, assembly.fresh_tokens, leases, placed)


def encode_fresh(
    engine: Engine, views: Sequence[PromptView], assemblies: Sequence[Assembly], *, lazy: bool = False
) -> None:
    """Encode what modules do not hold, the first such text of every prompt together, then the second, ...

    A text attends to all that stands before it in its prompt, as it would in an ordinary one.

    Args:
        engine: Encodes it.
        views: Of the prompts, which get it.
        assemblies: The same prompts.
        lazy: In the step of the answer that reads it, instead of now.
    """
    for wave in range(max((len(assembly.fresh) for assembly in assemblies), default=0)):
        now = [(view, each.fresh[wave]) for view, each in zip(views, assemblies, strict=True) if wave < len(each.fresh)]
        handles = engine.prefill([_prefill(view, text, lazy=lazy) for view, text in now])
        for (view, text), handle in zip(now, handles, strict=True):
            view.leases.add([handle])
            view.placed = sorted([*view.placed, (text.offset, handle)], key=lambda each: each[0])


def _prefill(view: PromptView, text: FreshText, *, lazy: bool) -> Prefill:
    before = [(offset, handle) for offset, handle in view.placed if offset < text.offset]
    return Prefill(
        text.tokens,
        [handle for _, handle in before],
        [offset for offset, _ in before],
        text.offset,
        "/".join(text.module) or None,
        text.role,
        confidential=text.confidential,
        lazy=lazy,
    )


def release_all(views: Iterable[PromptView]) -> None:
    """Give all leases back."""
    for view in views:
        view.release()
