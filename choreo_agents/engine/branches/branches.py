"""Merging branches: from their caches, mapped or as they are, or from their words (Parallel-Synthesis)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from choreo_agents.engine.branches.steps import SHORTER, MergedView, MergeSteps
from choreo_agents.engine.calling import Caller, Plan, Terms
from choreo_agents.engine.calls import Calls, Content, Prefill
from choreo_agents.kv.handle import MessageHandle

T = TypeVar("T")


class Branches:
    """What an engine does with messages that stand beside each other: `engine.branches`.

    Every sync call does what its async form does.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._tenant = caller.tenant

    async def amap(self, handles: Sequence[MessageHandle], adapter: str | None = None) -> list[MessageHandle]:
        """See `map`."""
        return await self._caller.arun(self._plan(MergeSteps.mapped, handles, adapter))

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
        return self._caller.run(self._plan(MergeSteps.mapped, handles, adapter))

    def maps(self, adapter: str | None = None) -> bool:
        """Tell whether an adapter has a cache mapper, and the engine caches for it to map.

        Raises:
            AdapterError: There is no such adapter.
        """
        return MergeSteps(self._tenant, None).maps(adapter)

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
        return MergeSteps(self._tenant, None).boundaries(branches, trunk, offsets, anchors, adapter)

    async def asummaries(self, branches: Sequence[MessageHandle], ask: str = SHORTER) -> list[MessageHandle]:
        """See `summaries`."""
        return await self._caller.arun(self._plan(MergeSteps.summaries, branches, ask))

    def summaries(self, branches: Sequence[MessageHandle], ask: str = SHORTER) -> list[MessageHandle]:
        """What each branch's speaker says when asked to be short, after all that it has seen and said.

        Returns:
            Leased handles.
        """
        return self._caller.run(self._plan(MergeSteps.summaries, branches, ask))

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
        plan = self._plan(MergeSteps.merge, branches, prompt, **options)
        return await self._caller.arun(plan, Terms(priority, timeout_s))

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
            strategy: `parallel` (the default), `sequential`, `text` or `summary` (see `synthesis.placing`).
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
        plan = self._plan(MergeSteps.merge, branches, prompt, **options)
        return self._caller.run(plan, Terms(priority, timeout_s))

    async def aview(
        self,
        branches: Sequence[MessageHandle],
        prompt: Content = "",
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> MergedView:
        """See `view`."""
        plan = self._plan(MergeSteps.view, branches, prompt, **options)
        return await self._caller.arun(plan, Terms(priority, timeout_s))

    def view(
        self,
        branches: Sequence[MessageHandle],
        prompt: Content = "",
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> MergedView:
        """What `merge` would decode over, ready for `stream` or several decodes. Arguments as for `merge`."""
        plan = self._plan(MergeSteps.view, branches, prompt, **options)
        return self._caller.run(plan, Terms(priority, timeout_s))

    def _plan(
        self, steps: Callable[..., Generator[Calls, list[MessageHandle], T]], *args: Any, **options: Any
    ) -> Plan[T]:
        return lambda scope: steps(MergeSteps(self._tenant, scope), *args, **options)
