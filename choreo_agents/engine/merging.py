"""Merging branches: from their caches, mapped or as they are, or from their words (Parallel-Synthesis)."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from choreo_agents.engine import branches as lineages
from choreo_agents.engine.calling import Calling
from choreo_agents.engine.calls import Content, Decode, Prefill
from choreo_agents.engine.desk import Answer
from choreo_agents.engine.merge_steps import SHORTER, Calls, MergedView, MergeSteps
from choreo_agents.engine.scope import Scope
from choreo_agents.kv.handle import MessageHandle

__all__ = ["SHORTER", "MergedView", "Merging"]

_Plan = Callable[[MergeSteps], Generator[Calls, list[MessageHandle], Any]]
"""What is to be done, of all that merging knows to do."""


@dataclass(frozen=True)
class _Terms:
    """What all calls of one merge have in common."""

    scope: Scope | None
    """Which takes their leases."""
    priority: int = 0
    timeout_s: float | None = None
    """Of all of them together, from `started` on, as `time.perf_counter` counts."""
    started: float = field(default_factory=time.perf_counter)

    def put_on(self, calls: Calls) -> Any:
        """The same calls under these terms, with the time that is left."""
        left = self.timeout_s
        if isinstance(left, int | float) and left > 0:
            left = max(0.0, left - (time.perf_counter() - self.started))
        return [replace(call, priority=self.priority, timeout_s=left) for call in calls]


class Merging(Calling):
    """The calls that merge branches. Every sync one does what its async form does."""

    async def amap(self, handles: Sequence[MessageHandle], adapter: str | None = None) -> list[MessageHandle]:
        """See `map`."""
        mapped: list[MessageHandle] = await self._adrive(lambda steps: steps.mapped(handles, adapter))
        return mapped

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
        mapped: list[MessageHandle] = self._drive(lambda steps: steps.mapped(handles, adapter))
        return mapped

    def maps(self, adapter: str | None = None) -> bool:
        """Whether an adapter has a cache mapper, and the engine caches for it to map.

        Raises:
            AdapterError: There is no such adapter.
        """
        return lineages.maps(self._desk, adapter)

    def boundaries(
        self,
        branches: Sequence[MessageHandle],
        trunk: Sequence[MessageHandle],
        offsets: Sequence[int],
        anchors: Sequence[int],
        adapter: str | None = None,
    ) -> list[Prefill]:
        """What an adapter's synthesizer reads behind each branch: the opening of a next turn, after trunk and branch.

        The branch stands there where it left the trunk, or right behind all of it.

        `merge` takes care of it. Whoever places branches by hand prefills it, and shows it where the branch ends.

        Args:
            branches: As they are shown, mapped or not.
            trunk: What is shown before all of them, ...
            offsets: ... and where.
            anchors: Where each branch is shown.
            adapter: The synthesizer's; None: the engine's own.

        Returns:
            One call for each branch; none if the adapter was not trained with boundaries, the method keeps no KV, or
            the chat template opens turns with nothing.

        Raises:
            AdapterError: There is no such adapter.
            HandleError: A branch is unknown, released, or another model's.
        """
        return lineages.boundaries(self._desk, branches, trunk, offsets, anchors, adapter)

    async def asummaries(self, branches: Sequence[MessageHandle], ask: str = SHORTER) -> list[MessageHandle]:
        """What each branch's speaker says when asked to be short, after all that it has seen and said.

        Returns:
            Leased handles.
        """
        said: list[MessageHandle] = await self._adrive(lambda steps: steps.summaries(branches, ask))
        return said

    async def amerge(
        self,
        branches: Sequence[MessageHandle],
        prompt: Content = "",
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> MessageHandle:
        """See `merge`."""
        merged: MessageHandle = await self._adrive(
            lambda steps: steps.merge(branches, prompt, **options), priority, timeout_s
        )
        return merged

    def merge(
        self,
        branches: Sequence[MessageHandle],
        prompt: Content = "",
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> MessageHandle:
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
            sampling: How tokens are chosen; `memo` and `confidential` as for `decode`.
            priority: Of all calls that this takes; `timeout_s`: of all of them together.
            summary: What workers are asked under `summary`.

        Returns:
            A leased handle of what the synthesizer said.

        Raises:
            InvalidRequestError: No branch, no such strategy, or it can never fit.
            AdapterError: There is no such adapter.
            HandleError: A branch is unknown, released, or another model's or tenant's.
        """
        merged: MessageHandle = self._drive(lambda steps: steps.merge(branches, prompt, **options), priority, timeout_s)
        return merged

    async def amerged_view(
        self,
        branches: Sequence[MessageHandle],
        prompt: Content = "",
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> MergedView:
        """What `merge` would decode over, ready for `astream` or several decodes. Arguments as for `merge`."""
        view: MergedView = await self._adrive(
            lambda steps: steps.view(branches, prompt, **options), priority, timeout_s
        )
        return view

    def _drive(self, plan: _Plan, priority: int = 0, timeout_s: float | None = None) -> Any:
        terms = _Terms(self._scope(), priority, timeout_s)
        with closing(plan(MergeSteps(self._desk, terms.scope))) as steps:
            try:
                calls = next(steps)
                while True:
                    calls = terms.put_on(calls)
                    answers = self._submitted(calls, terms.scope, self._enter(calls))
                    calls = steps.send(self._wait(answers, terms.scope, one=False))
            except StopIteration as done:
                return done.value

    async def _adrive(self, plan: _Plan, priority: int = 0, timeout_s: float | None = None) -> Any:
        terms = _Terms(self._scope(), priority, timeout_s)
        with closing(plan(MergeSteps(self._desk, terms.scope))) as steps:
            try:
                calls = next(steps)
                while True:
                    calls = terms.put_on(calls)
                    answers = self._submitted(calls, terms.scope, await self._aenter(calls))
                    calls = steps.send(await self._await(answers, terms.scope, one=False))
            except StopIteration as done:
                return done.value

    def _submitted(self, calls: Any, scope: Scope | None, started: float) -> list[Answer]:
        submit: Any = self._desk.submit_decodes if isinstance(calls[0], Decode) else self._desk.submit_prefills
        answers: list[Answer] = submit(calls, scope, started)
        return answers
