"""Merging branches: from their caches, mapped or as they are, or from their words (Parallel-Synthesis)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from choreo_agents.engine import branches as lineages
from choreo_agents.engine.calling import Calling
from choreo_agents.engine.calls import Content, Decode, Prefill
from choreo_agents.engine.scope import Scope
from choreo_agents.errors import HandleError, InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.strategies import Strategy, anchored, require_strategy

SHORTER = "Say what you found, shorter."
"""What workers are asked for a summary."""
_Calls = list[Prefill] | list[Decode]


@dataclass(frozen=True)
class MergedView:
    """What a synthesizer attends to, and where; as arguments of `decode` and its kin."""

    handles: list[MessageHandle]
    offsets: list[int | None]
    end: int
    """Where the synthesizer's own message starts."""
    made: list[MessageHandle] = field(default_factory=list)
    """Messages that were encoded for this view alone: to be released after its use."""


class Merging(Calling):
    """The calls that merge branches. Every sync one does what its async form does."""

    async def amap(self, handles: Sequence[MessageHandle], adapter: str | None = None) -> list[MessageHandle]:
        """See `map`."""
        mapped = await self.aprefill([self._mapping(handle, adapter) for handle in handles]) if handles else []
        return self._kept(handles, mapped)

    def map(self, handles: Sequence[MessageHandle], adapter: str | None = None) -> list[MessageHandle]:
        """The same messages as a synthesizer's cache mapper shows them: copies, made once and found again.

        They live as long as the messages that they are copies of.

        Args:
            handles: What to map.
            adapter: Whose mapper; None: that of the engine's own adapter.

        Raises:
            AdapterError: It has no mapper.
            HandleError: A handle is unknown, released, or another model's.
        """
        mapped = self.prefill([self._mapping(handle, adapter) for handle in handles]) if handles else []
        return self._kept(handles, mapped)

    def maps(self, adapter: str | None = None) -> bool:
        """Whether an adapter has a cache mapper, and the engine caches for it to map.

        Raises:
            AdapterError: There is no such adapter.
        """
        return lineages.maps(self._desk, adapter)

    async def asummaries(self, branches: Sequence[MessageHandle], ask: str = SHORTER) -> list[MessageHandle]:
        """What each branch's speaker says when asked to be short, after all that it has seen and said.

        Returns:
            Leased handles.
        """
        made, scope = list[MessageHandle](), self._scope()
        try:
            said: list[MessageHandle] = await self._adrive(self._summaries(branches, ask, made))
            return said
        finally:
            self._give_back(made, scope)

    async def amerge(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MessageHandle:
        """See `merge`."""
        merged: MessageHandle = await self._adrive(self._merge(branches, prompt, **options))
        return merged

    def merge(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MessageHandle:
        """Say one message about several branches, from their caches (Parallel-Synthesis).

        Args:
            branches: What the workers said.
            prompt: What the synthesizer is asked, a user's turn if it is text; empty: nothing.
            trunk: What it sees besides, before the branches; None: what all branches have seen from the start on.
            strategy: `parallel` (the default), `sequential`, `text` or `summary` (see `synthesis.strategies`).
            adapter: Encodes what is the synthesizer's own, and maps the branches if it has a mapper; None: the
                engine's own.
            author: The synthesizer's name, in the header of what it says.
            header: What that starts with; None: the chat template's header with the author's name.
            sampling: How tokens are chosen; `priority`, `timeout_s`, `memo` and `confidential` as for `decode`.
            summary: What workers are asked under `summary`.

        Returns:
            A leased handle of what the synthesizer said.

        Raises:
            InvalidRequestError: No branch, no such strategy, or it can never fit.
            AdapterError: There is no such adapter.
            HandleError: A branch is unknown, released, or another model's or tenant's.
        """
        with closing(self._merge(branches, prompt, **options)) as steps:
            try:
                calls = next(steps)
                while True:
                    calls = steps.send(self._run(calls))
            except StopIteration as done:
                merged: MessageHandle = done.value
                return merged

    async def amerged_view(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MergedView:
        """What `merge` would decode over, ready for `astream` or several decodes. Arguments as for `merge`."""
        view: MergedView = await self._adrive(self._view(branches, prompt, **options))
        return view

    def _merge(
        self,
        branches: Sequence[MessageHandle],
        prompt: Content,
        *,
        trunk: Sequence[MessageHandle] | None = None,
        strategy: Strategy = "parallel",
        adapter: str | None = None,
        author: str | None = None,
        header: Content | None = None,
        sampling: Sampling | None = None,
        summary: str = SHORTER,
        **options: Any,
    ) -> Generator[_Calls, list[MessageHandle], MessageHandle]:
        """Yields what has to be done, is sent what came of it, returns what was said."""
        chat, scope = self._desk.core.model.chat, self._scope()
        view = yield from self._view(
            branches, prompt, trunk=trunk, strategy=strategy, adapter=adapter, author=author, summary=summary
        )
        try:
            start = chat.header(author) if header is None else header
            call = Decode(
                start,
                view.handles,
                view.offsets,
                view.end,
                sampling or Sampling(),
                author=author,
                closing=chat.turn_end,
                adapter=adapter,
                **options,
            )
            [merged] = yield [call]
        finally:
            self._give_back(view.made, scope)
        return merged

    def _view(
        self,
        branches: Sequence[MessageHandle],
        prompt: Content,
        *,
        trunk: Sequence[MessageHandle] | None = None,
        strategy: Strategy = "parallel",
        adapter: str | None = None,
        author: str | None = None,
        summary: str = SHORTER,
    ) -> Generator[_Calls, list[MessageHandle], MergedView]:
        require_strategy(strategy)
        branches = _listed(branches, "branches")
        if not branches:
            raise InvalidRequestError("there is no branch to merge: give a list of one at least")
        desk, made, scope = self._desk, list[MessageHandle](), self._scope()
        try:
            shared = lineages.shared_trunk(desk, branches, self._scope()) if trunk is None else _listed(trunk, "trunk")
            made += shared if trunk is None else []
            depths = lineages.depths(desk, branches, shared)
            if strategy == "summary":
                branches = yield from self._summaries(branches, summary, made)
                made += branches
            shown = list(branches)
            if strategy == "text":
                shown = yield from self._again(branches, shared, adapter, made)
            elif self.maps(adapter):
                shown = yield [self._mapping(handle, adapter) for handle in branches]
                self._kept(branches, shown)
            placed = anchored(strategy, [h.length for h in shared], [h.length for h in shown], depths)
            handles, offsets = [*shared, *shown], list[int | None]([*placed.trunk, *placed.branches])
            end = placed.end
            if len(prompt):
                words = desk.core.model.chat.turn("user", prompt) if isinstance(prompt, str) else prompt
                asker = f"{author}.system" if author else None
                [asked] = yield [Prefill(words, handles, offsets, end, asker, "user", adapter=adapter)]
                made.append(asked)
                handles, offsets, end = [*handles, asked], [*offsets, end], end + asked.length
            return MergedView(handles, offsets, end, made)
        except BaseException:
            self._give_back(made, scope)
            raise

    def _again(
        self,
        branches: Sequence[MessageHandle],
        trunk: Sequence[MessageHandle],
        adapter: str | None,
        made: list[MessageHandle],
    ) -> Generator[_Calls, list[MessageHandle], list[MessageHandle]]:
        """The branches' words, each encoded after the trunk and those before it."""
        copies: list[MessageHandle] = []
        for branch in branches:
            said = self._desk.find(branch)
            words, seen = said.tokens, [*trunk, *copies]
            call = Prefill(words, seen, author=said.author, role=said.role, source=branch, adapter=adapter)
            [copy] = yield [call]
            copies.append(copy)
            made.append(copy)
        return copies

    def _summaries(
        self, branches: Sequence[MessageHandle], ask: str, made: list[MessageHandle]
    ) -> Generator[_Calls, list[MessageHandle], list[MessageHandle]]:
        """What each branch's worker says when it is asked to be short: after all that it has seen and said."""
        desk, chat = self._desk, self._desk.core.model.chat
        workers = [(desk.find(branch).author, lineages.encoder_name(desk, branch)) for branch in branches]
        views: list[tuple[list[MessageHandle], list[int | None], int]] = []
        for branch in branches:
            seen, starts = zip(*lineages.view_of(desk, branch, self._scope()), strict=True)
            made += seen[:-1]
            end = max(offset + handle.length for handle, offset in zip(seen, starts, strict=True))
            views.append(([*seen], [*starts], end))
        turn, each = chat.turn("user", ask), zip(views, workers, strict=True)
        asked = yield [Prefill(turn, *view, role="user", adapter=encoder) for view, (_, encoder) in each]
        made += asked
        return (
            yield [
                Decode(
                    chat.header(author),
                    [*seen, question],
                    [*offsets, end],
                    end + question.length,
                    Sampling(max_tokens=branch.length),
                    author=author,
                    closing=chat.turn_end,
                    adapter=encoder,
                )
                for branch, question, (seen, offsets, end), (author, encoder) in zip(
                    branches, asked, views, workers, strict=True
                )
            ]
        )

    def _mapping(self, handle: MessageHandle, adapter: str | None) -> Prefill:
        said = self._desk.find(handle)
        return Prefill(said.tokens, [handle], author=said.author, role=said.role, adapter=adapter, maps=True)

    def _kept(self, sources: Sequence[MessageHandle], mapped: list[MessageHandle]) -> list[MessageHandle]:
        """Let copies live as long as their sources, instead of under leases of their own."""
        lineages.keep(self._desk, sources, mapped, self._scope())
        return mapped

    def _give_back(self, handles: Sequence[MessageHandle], scope: Scope | None) -> None:
        """Drop leases that were taken in a scope; if it has ended meanwhile, they ended with it."""
        for handle in handles if scope is None or not scope.closed else ():
            with suppress(HandleError):
                self._desk.release(handle, scope, spare_only=False)

    def _run(self, calls: Any) -> list[MessageHandle]:
        made: list[MessageHandle] = self.decode(calls) if isinstance(calls[0], Decode) else self.prefill(calls)
        return made

    async def _adrive(self, steps: Generator[_Calls, list[MessageHandle], Any]) -> Any:
        with closing(steps):
            try:
                calls = next(steps)
                while True:
                    calls = steps.send(await self._arun(calls))
            except StopIteration as done:
                return done.value

    async def _arun(self, calls: Any) -> list[MessageHandle]:
        decodes = isinstance(calls[0], Decode)
        made: list[MessageHandle] = await self.adecode(calls) if decodes else await self.aprefill(calls)
        return made


def _listed(handles: Any, what: str) -> list[MessageHandle]:
    if isinstance(handles, MessageHandle | str) or not isinstance(handles, Iterable):
        raise InvalidRequestError(f"{what} must be a list of handles, not {handles!r}")
    return list(handles)
