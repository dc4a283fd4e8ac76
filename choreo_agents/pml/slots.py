"""Texts that are to be encoded once, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from choreo_agents.engine import Engine, Prefill
from choreo_agents.engine.transfer.leases import Leases
from choreo_agents.errors import HandleError
from choreo_agents.kv.entry import TierName
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.store import KVKey

Place = Literal["device", "host", "disk", "nowhere"]


@dataclass(frozen=True)
class Recipe:
    """A text that is to be encoded once."""

    key: str
    tokens: tuple[int, ...]
    start: int
    """The position of its first token."""
    parents: tuple[str, ...] = ()
    """Keys of the texts that it attends to, in order, each where its own recipe puts it."""
    author: str | None = None
    confidential: bool = False


@dataclass(eq=False)
class RecipeSlot:
    """A recipe and what became of it."""

    recipe: Recipe
    parents: tuple[RecipeSlot, ...]
    kv_key: KVKey
    """Its name, known before it is encoded."""
    handle: MessageHandle | None = None
    leases: Leases | None = None
    """The shelf's lease of it, of no scope."""
    arriving: Future[bool] | None = None
    """Being read from a file: whether that was good."""
    pinned: bool = False
    removed: bool = False

    @property
    def tokens(self) -> int:
        return len(self.recipe.tokens)

    def leased(self) -> MessageHandle:
        assert self.handle is not None, "it has not arrived"
        return self.handle

    def tier(self, engine: Engine) -> TierName | None:
        """The fastest memory of the engine's that has it; None: it is not leased there, or was released by others."""
        found = None if self.handle is None else engine.kv.tiers([self.handle])[0]
        if found is None:
            self.handle, self.leases = None, None
        return found

    def keep(self, engine: Engine, handle: MessageHandle) -> None:
        """Lease a message for the shelf; one lease is enough."""
        assert handle.id == self.kv_key.id
        self.give_up()
        self.handle, self.leases = handle, engine.kv.lease([handle], scoped=False)

    def give_up(self) -> None:
        """Return the lease."""
        leases, self.handle, self.leases = self.leases, None, None
        if leases is not None:
            leases.release()

    def unpin(self, engine: Engine) -> None:
        """Let it leave the device."""
        pinned, self.pinned = self.pinned, False
        if pinned and self.handle is not None:
            with suppress(HandleError):
                engine.kv.unpin(self.handle)

    def call(self) -> Prefill:
        """What encodes it, once its parents are there."""
        handles, starts = [each.leased() for each in self.parents], [each.recipe.start for each in self.parents]
        recipe = self.recipe
        return Prefill(
            recipe.tokens, handles, starts, recipe.start, recipe.author, "module", confidential=recipe.confidential
        )


def needed(slots: Iterable[RecipeSlot]) -> list[RecipeSlot]:
    """These and all that they attend to, each once, parents first."""
    found: dict[RecipeSlot, None] = {}

    def collect(slot: RecipeSlot) -> None:
        if slot not in found:
            for parent in slot.parents:
                collect(parent)
            found[slot] = None

    for slot in slots:
        collect(slot)
    return list(found)


def levels(slots: Iterable[RecipeSlot]) -> list[list[RecipeSlot]]:
    """The same, parents in a level before."""
    depths: dict[RecipeSlot, int] = {}
    found: list[list[RecipeSlot]] = []
    for slot in slots:
        depth = 1 + max((depths[parent] for parent in slot.parents), default=-1)
        depths[slot] = depth
        if depth == len(found):
            found.append([])
        found[depth].append(slot)
    return found


def batches(slots: Sequence[RecipeSlot], most: int) -> Iterator[list[RecipeSlot]]:
    """The same in parts of about so many tokens, or of one text."""
    batch, tokens = list[RecipeSlot](), 0
    for slot in slots:
        batch.append(slot)
        tokens += slot.tokens
        if tokens >= most:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch
