"""Merging of parallel branches into one message, after cache mapping (Parallel-Synthesis).

From their caches, mapped or as they are, or from their text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, TypeVar

from choreo_agents.engine.adapters import BASE
from choreo_agents.engine.calling import Plan, Steps, Tenant
from choreo_agents.engine.calls import Calls, Content, Decode, Prefill
from choreo_agents.engine.messages.message import Message, Scope
from choreo_agents.engine.request_builder import as_list
from choreo_agents.errors import InvalidRequestError, ReleasedHandleError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, LoadedModel, PromptText
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.placing import Strategy, anchored, require_strategy

T = TypeVar("T")
SHORTER = "Say what you found, shorter."
"""Prompt that asks workers for a summary."""
_Batches = Generator[Calls, list[MessageHandle], tuple[T, list[MessageHandle]]]
"""Generator that yields batches, is sent their handles, and returns a result, with the handles whose leases the caller
gets."""


@dataclass(frozen=True)
class MergedView:
    """View of a synthesizer, as arguments of `decode` and its kin."""

    handles: list[MessageHandle]
    offsets: list[int | None]
    end: int
    """Position of the synthesizer's own message."""
    owned: list[MessageHandle] = field(default_factory=list)
    """Messages encoded for this view alone: release them after use."""


class Branches:
    """Operations on messages that stand side by side: `engine.branches`.

    Sync and async forms follow the same plan. What a plan encodes on its way is released with it; the caller's scope
    takes the leases of its result.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    async def amap(self, handles: Sequence[MessageHandle], adapter: str | None = None) -> list[MessageHandle]:
        """See `map`."""
        return await self._tenant.arun(self._plan(self._map, handles, adapter))

    def map(self, handles: Sequence[MessageHandle], adapter: str | None = None) -> list[MessageHandle]:
        """Return the messages as a synthesizer's cache mapper shows them: copies, made once and found again.

        Copies live as long as their sources.

        Args:
            handles: Messages to map.
            adapter: Name of the adapter whose mapper is used; None: the engine's default.

        Raises:
            AdapterError: It has no mapper.
            HandleError: A handle is unknown, released, or another model's.
        """
        return self._tenant.run(self._plan(self._map, handles, adapter))

    def maps(self, adapter: str | None = None) -> bool:
        """Return whether an adapter has a cache mapper, and the engine's method keeps KV for it to map.

        Raises:
            AdapterError: There is no such adapter.
        """
        core = self._tenant.core
        with core.lock:
            self._tenant.require_tenancy()
            return bool(core.adapters.find(adapter, self._tenant.name).mapper_key) and core.method.keeps_kv

    def boundaries(
        self,
        branches: Sequence[MessageHandle],
        trunk: Sequence[MessageHandle],
        offsets: Sequence[int],
        anchors: Sequence[int],
        adapter: str | None = None,
    ) -> list[Prefill]:
        """Return prefills of what an adapter's synthesizer reads behind each branch: the opening of a next turn.

        Each is encoded after the trunk and its branch, which stands where it left the trunk, or right behind all of it.
        `merge` does this itself. If you place branches by hand, prefill it and show it where the branch ends.

        Args:
            branches: Branches as they are shown, mapped or not.
            trunk: Messages shown before all of them, ...
            offsets: ... and their positions.
            anchors: Position of each branch.
            adapter: Name of the synthesizer's adapter; None: the engine's default.

        Returns:
            One call for each branch; none if the adapter was not trained with boundaries, the method keeps no KV, or
                the chat template opens turns with nothing.

        Raises:
            AdapterError: There is no such adapter.
            HandleError: A branch is unknown, released, or another model's.
        """
        core = self._tenant.core
        with core.lock:
            if not (core.adapters.find(adapter, self._tenant.name).boundaries and core.method.keeps_kv):
                return []
            branch_tokens = [self._tenant.find(branch).tokens for branch in branches]
        openings = [core.model.opening(tokens) for tokens in branch_tokens]
        if not all(openings):
            return []
        ends = [at + handle.length for handle, at in zip(trunk, offsets, strict=True)]
        calls: list[Prefill] = []
        for opening, branch, anchor in zip(openings, branches, anchors, strict=True):
            start = min(anchor, max(ends, default=0))
            shown = [(handle, at) for handle, at, end in zip(trunk, offsets, ends, strict=True) if end <= start]
            handles, places = [handle for handle, _ in shown], [at for _, at in shown]
            calls.append(Prefill(opening, [*handles, branch], [*places, start], start + branch.length, adapter=adapter))
        return calls

    async def asummaries(self, branches: Sequence[MessageHandle], ask: str = SHORTER) -> list[MessageHandle]:
        """Return a short summary of each branch by its own author, after all that it has seen and said.

        Returns:
            Leased handles.
        """
        return await self._tenant.arun(self._plan(self._summaries, branches, ask))

    async def amerge(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MessageHandle:
        """See `merge`."""
        return await self._tenant.arun(self._plan(self._merge, branches, prompt, **options))

    def merge(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MessageHandle:
        """Merge several branches into one message, from their caches (Parallel-Synthesis).

        Args:
            branches: Answers of the workers.
            prompt: Prompt of the synthesizer, a user's turn if it is text; empty: none.
            trunk: Messages it sees before the branches; None: the common start of all branches' views.
            strategy: `parallel` (the default), `sequential`, `text` or `summary` (see `synthesis.placing`).
            adapter: Name of the adapter that encodes the synthesizer's own messages and maps the branches if it has a
                mapper; None: the engine's default.
            author: Name of the synthesizer, in the header of its message.
            header: Start of that message; None: the chat template's header with the author's name.
            sampling: How tokens are sampled; `idempotency_key` and `confidential` as for `decode`.
            priority: Priority of all calls that this takes; `timeout_s`: of all of them together.
            summary: Prompt for workers' summaries under the strategy `summary`.

        Returns:
            A leased handle of the synthesizer's message.

        Raises:
            InvalidRequestError: No branch, no such strategy, or it can never fit.
            AdapterError: There is no such adapter.
            HandleError: A branch is unknown, released, or another model's or tenant's.
        """
        return self._tenant.run(self._plan(self._merge, branches, prompt, **options))

    async def aview(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MergedView:
        """See `view`."""
        return await self._tenant.arun(self._plan(self._view, branches, prompt, **options))

    def view(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MergedView:
        """Return the view that `merge` would decode over, for `stream` or several decodes. Arguments as for `merge`."""
        return self._tenant.run(self._plan(self._view, branches, prompt, **options))

    def _plan(
        self,
        make: Callable[..., _Batches[T]],
        *args: Any,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Plan[T]:
        """Plan batches of calls, which have one priority, and one timeout for all of them together.

        They run in a scope of their own, which then ends.
        """

        def steps(tenant: Tenant) -> Steps[T]:
            core, scope = tenant.core, Scope(tenant.scope())
            began, remaining_s = time.perf_counter(), timeout_s
            try:
                with closing(make(scope, *args, **options)) as batches:
                    try:
                        calls = next(batches)
                        while True:
                            if isinstance(timeout_s, int | float) and timeout_s > 0:
                                remaining_s = max(0.0, timeout_s - (time.perf_counter() - began))
                            limited: Any = [replace(call, priority=priority, timeout_s=remaining_s) for call in calls]
                            handles = yield from tenant.run_batch(limited, scope)
                            if scope.outer is not None and scope.outer.closed:
                                raise ReleasedHandleError(
                                    "the scope of the call has ended: call within a scope that lasts"
                                )
                            calls = batches.send(handles)
                    except StopIteration as done:
                        result: T = done.value[0]
                        with core.lock:
                            self._lease([tenant.find(handle) for handle in done.value[1]], scope.outer)
            finally:
                core.close_scope(scope)
            yield result

        return steps

    def _merge(
        self,
        scope: Scope,
        branches: Sequence[MessageHandle],
        prompt: Content,
        *,
        adapter: str | None = None,
        author: str | None = None,
        trunk: Sequence[MessageHandle] | None = None,
        strategy: Strategy = "parallel",
        summary: str = SHORTER,
        header: Content | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> _Batches[MessageHandle]:
        """Decode the merged message. Arguments as for `Branches.merge`."""
        chat = self._tenant.core.model.chat
        view, _ = yield from self._view(
            scope, branches, prompt, trunk=trunk, strategy=strategy, summary=summary, adapter=adapter, author=author
        )
        start = chat.header(author, thinking=options.get("thinking") is not None) if header is None else header
        placed = start, view.handles, view.offsets, view.end, sampling or Sampling(), author
        [merged] = yield [Decode(*placed, turn_suffix=chat.turn_end, adapter=adapter, **options)]
        return merged, [merged]

    def _view(
        self,
        scope: Scope,
        branches: Sequence[MessageHandle],
        prompt: Content,
        *,
        trunk: Sequence[MessageHandle] | None = None,
        strategy: Strategy = "parallel",
        summary: str = SHORTER,
        adapter: str | None = None,
        author: str | None = None,
    ) -> _Batches[MergedView]:
        """Encode what the view needs, and return it."""
        require_strategy(strategy)
        branches = as_list(branches, "branches", "a list of handles")
        if not branches:
            raise InvalidRequestError("there is no branch to merge: pass a list of at least one")
        chat = self._tenant.core.model.chat
        shared = self._shared_trunk(branches, scope) if trunk is None else as_list(trunk, "trunk", "a list of handles")
        depths, shown, owned = self._depths(branches, shared), list(branches), [*(shared if trunk is None else ())]
        if strategy == "summary":
            shown, made = yield from self._summaries(scope, branches, summary)
            owned += made
        if strategy == "text":
            last, (shared, shown) = shared[-1:], (yield from self._reencode(shown, shared, adapter))
            owned += [*shown, *(shared[-1:] if shared[-1:] != last else ())]
        elif self.maps(adapter):
            shown, _ = yield from self._map(scope, shown, adapter)  # copies live as long as their sources
        placed = anchored(strategy, [h.length for h in shared], [h.length for h in shown], depths)
        handles, offsets = [*shared, *shown], list[int | None]([*placed.trunk, *placed.branches])
        end = placed.end
        behind: list[Prefill] = []
        if strategy != "text":
            behind = self.boundaries(shown, shared, placed.trunk, placed.branches, adapter)
        if behind:
            owned += (starts := (yield behind))
            handles += starts
            offsets += [at + branch.length for at, branch in zip(placed.branches, shown, strict=True)]
        asker = f"{author}.system" if author else None
        for content in _question_parts(chat, prompt, goes_on=strategy == "text" and chat.merges is not None):
            [question] = yield [Prefill(content, handles, offsets, end, asker, "user", adapter=adapter)]
            owned.append(question)
            handles, offsets, end = [*handles, question], [*offsets, end], end + question.length
        return MergedView(handles, offsets, end, owned), owned

    def _map(
        self, scope: Scope, handles: Sequence[MessageHandle], adapter: str | None
    ) -> _Batches[list[MessageHandle]]:
        """Map messages with an adapter's cache mapper; the copies live as long as their sources."""
        sources = as_list(handles, "handles", "a list of handles")
        messages = [self._tenant.find(source) for source in sources]
        calls = [
            Prefill(message.tokens, [source], author=message.author, role=message.role, adapter=adapter, maps=True)
            for source, message in zip(sources, messages, strict=True)
        ]
        copies = (yield calls) if calls else []
        self._attach(sources, copies, scope)
        return copies, []

    def _reencode(
        self, branches: Sequence[MessageHandle], trunk: Sequence[MessageHandle], adapter: str | None
    ) -> _Batches[list[MessageHandle]]:
        """Encode the branches' text again, each after the trunk and the branches before it.

        In chat formats where users and model alternate, all of it is one user's turn.

        Returns:
            The trunk, whose last message is encoded again if its turn goes on, and the branches' copies.
        """
        model, shown, copies = self._tenant.core.model, list(trunk), list[MessageHandle]()
        merges, opening = model.chat.merges, PromptText.special(model.chat.user.plain)
        last = self._tenant.find(shown[-1]) if shown and merges is not None else None
        if merges is not None and last is not None and (turn := _open_turn(model, last.tokens)) is not None:
            opening = PromptText.special(merges)
            if len(turn) < len(last.tokens):
                encoder = self._adapter_of(shown[-1])
                call = Prefill(turn, shown[:-1], author=last.author, role=last.role, source=shown[-1], adapter=encoder)
                [shown[-1]] = yield [call]
        for branch in branches:
            message = self._tenant.find(branch)
            text: Content = message.tokens
            role = message.role
            if merges is not None:
                text, role = opening + model.as_user_part(message.tokens), "user"
                opening = PromptText.special(merges)
            view = [*shown, *copies]
            copies += yield [Prefill(text, view, author=message.author, role=role, source=branch, adapter=adapter)]
        return shown, copies

    def _summaries(self, scope: Scope, branches: Sequence[MessageHandle], ask: str) -> _Batches[list[MessageHandle]]:
        """Summarize each branch by its own author, after all that it has seen and said."""
        chat, branches = self._tenant.core.model.chat, as_list(branches, "branches", "a list of handles")
        turn, views = chat.turn("user", ask), [self._view_of(branch, scope) for branch in branches]
        encoders = [self._adapter_of(branch) for branch in branches]
        questions = yield [
            Prefill(turn, *view, role="user", adapter=encoder) for view, encoder in zip(views, encoders, strict=True)
        ]
        calls: list[Decode] = []
        for branch, question, (handles, offsets, end), encoder in zip(
            branches, questions, views, encoders, strict=True
        ):
            message = _original(self._tenant.find(branch))
            header: Content = chat.header(message.author, thinking=False)
            if message.chosen is not None:
                header = message.tokens[: message.header]
            view = [*handles, question], [*offsets, end], end + question.length
            # Greedy, so that a node that runs again gets the same summaries.
            sampling = Sampling(temperature=0.0, max_tokens=branch.length)
            calls.append(Decode(header, *view, sampling, message.author, turn_suffix=chat.turn_end, adapter=encoder))
        summaries = yield calls
        return summaries, summaries

    def _view_of(self, branch: MessageHandle, scope: Scope) -> tuple[list[MessageHandle], list[int | None], int]:
        """Return a branch's view and itself last, with positions and their end; all but itself with a lease in a
        scope."""
        with self._tenant.core.lock:
            message = _original(self._tenant.find(branch))
            handles, start = [*self._lease(message.parents, scope), branch], message.native_offset
            offsets = [*(start + offset for offset in message.relative_offsets), start]
            end = max(offset + handle.length for handle, offset in zip(handles, offsets, strict=True))
            return handles, [*offsets], end

    def _shared_trunk(self, branches: Sequence[MessageHandle], scope: Scope) -> list[MessageHandle]:
        """Return the messages that all branches' views start with, each with a lease in a scope."""
        with self._tenant.core.lock:
            views = [_original(self._tenant.find(branch)).parents for branch in branches]
            alike = takewhile(lambda group: len(set(map(id, group))) == 1, zip(*views, strict=False))
            return self._lease([group[0] for group in alike], scope)

    def _depths(self, branches: Sequence[MessageHandle], trunk: Sequence[MessageHandle]) -> list[int]:
        """Return how many trunk messages each branch had seen when it was encoded; all, if it saw none of them.

        Raises:
            HandleError: One of them is unknown, released, or another model's.
        """
        with self._tenant.core.lock:
            depths: list[int] = []
            shared = [self._tenant.find(handle) for handle in trunk]
            for branch in branches:
                ancestors = set(self._tenant.find(branch).ancestors())
                deepest = [place for place, message in enumerate(shared, start=1) if message in ancestors]
                depths.append(max(deepest, default=len(trunk)))
            return depths

    def _attach(self, sources: Sequence[MessageHandle], copies: Sequence[MessageHandle], scope: Scope) -> None:
        """Let copies live as long as their sources: the leases of the plan become the sources'.

        Raises:
            HandleError: A source was released meanwhile; nothing is kept.
        """
        table = self._tenant.core.table
        with self._tenant.core.lock:
            if scope.outer is not None and scope.outer.closed:
                return
            pairs = [*zip(map(self._tenant.find, sources), map(self._tenant.find, copies), strict=True)]
            for source, copy in pairs:
                table.keep(source, copy, scope)

    def _adapter_of(self, branch: MessageHandle) -> str:
        """Return the name of the adapter that encoded a branch's original."""
        with self._tenant.core.lock:
            adapter = _original(self._tenant.find(branch)).lineage.adapter
            return self._tenant.core.adapters.name_of(adapter, self._tenant.name) or BASE

    def _lease(self, messages: Sequence[Message], scope: Scope | None) -> list[MessageHandle]:
        for message in messages if scope is None or not scope.closed else ():
            self._tenant.core.table.lease(message, scope)
        return [message.handle for message in messages]


def _original(message: Message) -> Message:
    """Return the source of a mapped copy; of any other message, itself."""
    while message.lineage.mapper:
        [message] = message.parents
    return message


def _question_parts(chat: ChatFormat, prompt: Content, *, goes_on: bool) -> Iterator[Content]:
    """Yield what to encode of a synthesizer's prompt; `goes_on`: inside a user's turn that is open."""
    if goes_on and isinstance(prompt, str) and prompt:
        yield PromptText.special(str(chat.merges)) + chat.part(prompt) + PromptText.special(chat.user.after)
        return
    if goes_on and chat.user.after:
        yield chat.user.after
    if len(prompt):
        yield chat.turn("user", prompt) if isinstance(prompt, str) else prompt


def _open_turn(model: LoadedModel, tokens: Sequence[int]) -> Sequence[int] | None:
    """Return the tokens of a user's turn without its end; None if they are no such turn."""
    chat, closing = model.chat, model.encode(model.chat.user.after)
    openings = [model.encode(text) for text in (chat.user.plain, chat.bos + chat.user.plain) if text]
    if not any([*tokens[: len(opening)]] == opening for opening in openings):
        return None
    ended = [*tokens[len(tokens) - len(closing) :]] == closing
    return tokens[: len(tokens) - len(closing)] if ended else None
