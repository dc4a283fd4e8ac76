"""Answers to assembled prompts: one or a batch, sync, async and streaming."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from choreo_agents.engine import Decode, Engine, StreamedToken
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.pml.prompt import Prompt
from choreo_agents.pml.views import PromptView, release_all
from choreo_agents.sampling import Sampling


class Answering(ABC):
    """What a library does with a prompt once it knows how to assemble one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @abstractmethod
    def _assembled(self, prompts: Sequence[Prompt], *, lazy: bool) -> list[PromptView]:
        """See `assemble_all`; if `lazy`, what is not imported is encoded in the step of the answer that reads it."""

    @property
    def engine(self) -> Engine:
        """That encodes and answers."""
        return self._engine

    def assemble(self, prompt: Prompt) -> PromptView:
        """Bring what a prompt imports to the device, and encode the rest of it.

        Raises:
            PMLError: Arguments longer than their slots, or a prompt longer than the model's context.
            InvalidRequestError: Its schema is not registered, or another one of that name is.
            CapacityError: Pinned messages leave no room now.
        """
        return self.assemble_all([prompt])[0]

    async def aassemble(self, prompt: Prompt) -> PromptView:
        """See `assemble`. If the awaiting task is cancelled, what was leased for it is given back."""
        return (await self.aassemble_all([prompt]))[0]

    def assemble_all(self, prompts: Sequence[Prompt]) -> list[PromptView]:
        """Bring what prompts import to the device, and encode the rest of them.

        What they have in common is in the views of all, and in memory once. Raises what `assemble` raises.
        """
        return self._assembled(prompts, lazy=False)

    async def aassemble_all(self, prompts: Sequence[Prompt]) -> list[PromptView]:
        """See `assemble_all`."""
        return await _beside(lambda: self._assembled(prompts, lazy=False))

    def generate(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> MessageHandle:
        """Answer a prompt of a registered schema as the assistant: a leased handle. Raises what `assemble` raises.

        Args:
            prompt: The prompt.
            sampling: How tokens are chosen.
            options: As of `engine.decode`; `author` names the speaker.
        """
        return self.generate_all([prompt], sampling, **options)[0]

    def generate_all(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, **options: Any
    ) -> list[MessageHandle]:
        """Answer several prompts as one batch: as many answers to each as `sampling.n`, one after the other."""
        views = self._assembled(prompts, lazy=True)
        try:
            return self._engine.decode([_decode(self._engine, view, sampling, options) for view in views])
        finally:
            release_all(views)

    async def agenerate(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> MessageHandle:
        """See `generate`."""
        return (await self.agenerate_all([prompt], sampling, **options))[0]

    async def agenerate_all(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, **options: Any
    ) -> list[MessageHandle]:
        """See `generate_all`."""
        views = await _beside(lambda: self._assembled(prompts, lazy=True))
        try:
            return await self._engine.adecode([_decode(self._engine, view, sampling, options) for view in views])
        finally:
            release_all(views)

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[StreamedToken | MessageHandle]:
        """Answer a prompt, yielding each token as it comes and the handle last."""
        [view] = self._assembled([prompt], lazy=True)
        with view:
            yield from self._engine.stream(**vars(_decode(self._engine, view, sampling, options)))

    async def astream(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Any
    ) -> AsyncGenerator[StreamedToken | MessageHandle]:
        """See `stream`. Leaving the loop early cancels the answer."""
        [view] = await _beside(lambda: self._assembled([prompt], lazy=True))
        with view:
            async for each in self._engine.astream(**vars(_decode(self._engine, view, sampling, options))):
                yield each


def _decode(engine: Engine, view: PromptView, sampling: Sampling | None, options: dict[str, Any]) -> Decode:
    # A header that opens thoughts is for calls that tell them from the answer: else readers would be given both.
    opening = engine.chat.header(options.get("author"), thinking=options.get("thinking") is not None)
    header: dict[str, Any] = {"header": opening, "closing": engine.chat.turn_end}
    seen: dict[str, Any] = {"parents": view.handles, "offsets": view.offsets, "new_offset": view.end}
    return Decode(**(header | seen | {"sampling": sampling or Sampling()} | options))


async def _beside(assemble: Callable[[], list[PromptView]]) -> list[PromptView]:
    """Views that another thread assembles; given back if nobody waits for them any more."""
    views: Future[list[PromptView]] = Future()
    working = asyncio.to_thread(lambda: views.set_result(assemble()))
    try:
        await working
    except asyncio.CancelledError:
        # Its thread goes on.
        views.add_done_callback(lambda done: release_all(done.result()))
        raise
    return views.result()
