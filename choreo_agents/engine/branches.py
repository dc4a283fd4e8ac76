"""Merging of parallel branches into one message, after cache mapping (Parallel-Synthesis).

From their caches, mapped or as they are, or from their text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, TypeVar

from choreo_agents.engine.adapters import BASE
from choreo_agents.engine.calling import Plan, Tenant
from choreo_agents.engine.calls import Content, Decode, Prefill
from choreo_agents.engine.messages.message import Message, Scope
from choreo_agents.engine.request_builder import as_list
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import HandleError, InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, LoadedModel, PromptText
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.placing import Strategy, anchored, require_strategy

T = TypeVar("T")
SHORTER = "Say what you found, shorter."
"""Prompt that asks workers for a summary."""


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

    Sync and async forms follow the same plan. The caller's scope takes all leases; if it ends meanwhile, they end with
    it.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    async def amap(self, handles: Sequence[MessageHandle], adapter: str | None = None) -> list[MessageHandle]:
        """See `map`."""
        return await self._tenant.arun(self._map(handles, adapter, self._tenant.scope()))

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
        return self._tenant.run(self._map(handles, adapter, self._tenant.scope()))

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
        return await self._tenant.arun(self._summarize(branches, ask))

    async def amerge(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MessageHandle:
        """See `merge`."""
        return await self._tenant.arun(self._limited(self._merge, branches, prompt, **options))

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
        return self._tenant.run(self._limited(self._merge, branches, prompt, **options))

    async def aview(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MergedView:
        """See `view`."""
        return await self._tenant.arun(self._limited(self._build_view, branches, prompt, **options))

    def view(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MergedView:
        """Return the view that `merge` would decode over, for `stream` or several decodes. Arguments as for `merge`."""
        return self._tenant.run(self._limited(self._build_view, branches, prompt, **options))

    def _limited(
        self,
        plan: Callable[..., Plan[T]],
        *args: Any,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Plan[T]:
        """Follow a plan whose calls have one priority, and one timeout for all of them together."""
        began, remaining_s = time.perf_counter(), timeout_s
        with closing(plan(*args, **options)) as batches:
            try:
                calls = next(batches)
                while True:
                    if isinstance(timeout_s, int | float) and timeout_s > 0:
                        remaining_s = max(0.0, timeout_s - (time.perf_counter() - began))
                    limited: Any = [replace(call, priority=priority, timeout_s=remaining_s) for call in calls]
                    calls = batches.send((yield limited))
            except StopIteration as done:
                result: T = done.value
        return result

    def _merge(
        self,
        branches: Sequence[MessageHandle],
        prompt: Content,
        *,
        trunk: Sequence[MessageHandle] | None = None,
        strategy: Strategy = "parallel",
        summary: str = SHORTER,
        adapter: str | None = None,
        author: str | None = None,
        header: Content | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> Plan[MessageHandle]:
        """Decode the merged message. Arguments as for `Branches.merge`."""
        chat = self._tenant.core.model.chat
        owned = Leases(self._tenant, self._tenant.scope(), [])
        view = yield from self._build_view(
            branches, prompt, trunk=trunk, strategy=strategy, summary=summary, adapter=adapter, author=author
        )
        owned.add(view.owned)
        try:
            start = chat.header(author, thinking=options.get("thinking") is not None) if header is None else header
            placed = start, view.handles, view.offsets, view.end, sampling or Sampling(), author
            [merged] = yield [Decode(*placed, turn_suffix=chat.turn_end, adapter=adapter, **options)]
        finally:
            owned.release()
        return merged

    def _build_view(
        self,
        branches: Sequence[MessageHandle],
        prompt: Content,
        *,
        trunk: Sequence[MessageHandle] | None = None,
        strategy: Strategy = "parallel",
        summary: str = SHORTER,
        adapter: str | None = None,
        author: str | None = None,
    ) -> Plan[MergedView]:
        """Encode what the view needs, and return it."""
        require_strategy(strategy)
        branches = as_list(branches, "branches", "a list of handles")
        if not branches:
            raise InvalidRequestError("there is no branch to merge: pass a list of at least one")
        chat, scope = self._tenant.core.model.chat, self._tenant.scope()
        owned = Leases(self._tenant, scope, [])
        try:
            if trunk is None:
                shared = self._shared_trunk(branches, scope)
                owned.add(shared)
            else:
                shared = as_list(trunk, "trunk", "a list of handles")
            depths = self._depths(branches, shared)
            shown = list(branches)
            if strategy == "summary":
                shown = yield from self._summaries(branches, summary, owned)
                owned.add(shown)
            if strategy == "text":
                shared, shown = yield from self._reencode(shown, shared, adapter, owned)
            elif self.maps(adapter):
                shown = yield from self._map(shown, adapter, scope)
            placed = anchored(strategy, [h.length for h in shared], [h.length for h in shown], depths)
            handles, offsets = [*shared, *shown], list[int | None]([*placed.trunk, *placed.branches])
            end = placed.end
            behind: list[Prefill] = []
            if strategy != "text":
                behind = self.boundaries(shown, shared, placed.trunk, placed.branches, adapter)
            if behind:
                starts = yield behind
                owned.add(starts)
                handles += starts
                offsets += [at + branch.length for at, branch in zip(placed.branches, shown, strict=True)]
            asker = f"{author}.system" if author else None
            for content in _question_parts(chat, prompt, goes_on=strategy == "text" and chat.merges is not None):
                [question] = yield [Prefill(content, handles, offsets, end, asker, "user", adapter=adapter)]
                owned.add([question])
                handles, offsets, end = [*handles, question], [*offsets, end], end + question.length
            return MergedView(handles, offsets, end, owned.handles)
        except BaseException:
            owned.release()
            raise

    def _map(
        self, handles: Sequence[MessageHandle], adapter: str | None, scope: Scope | None
    ) -> Plan[list[MessageHandle]]:
        """Map messages with an adapter's cache mapper; the copies live as long as their sources."""
        sources = as_list(handles, "handles", "a list of handles")
        messages = [self._tenant.find(source) for source in sources]
        calls = [
            Prefill(message.tokens, [source], author=message.author, role=message.role, adapter=adapter, maps=True)
            for source, message in zip(sources, messages, strict=True)
        ]
        copies = (yield calls) if calls else []
        self._attach(sources, copies, scope)
        return copies

    def _summarize(self, branches: Sequence[MessageHandle], ask: str) -> Plan[list[MessageHandle]]:
        """Summarize each branch by its own author."""
        owned = Leases(self._tenant, self._tenant.scope(), [])
        try:
            return (yield from self._summaries(as_list(branches, "branches", "a list of handles"), ask, owned))
        finally:
            owned.release()

    def _reencode(
        self, branches: Sequence[MessageHandle], trunk: Sequence[MessageHandle], adapter: str | None, owned: Leases
    ) -> Plan[tuple[list[MessageHandle], list[MessageHandle]]]:
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
                _, encoder = self._original_and_adapter(shown[-1])
                call = Prefill(turn, shown[:-1], author=last.author, role=last.role, source=shown[-1], adapter=encoder)
                [shown[-1]] = yield [call]
                owned.add(shown[-1:])
        for branch in branches:
            message = self._tenant.find(branch)
            text: Content = message.tokens
            role = message.role
            if merges is not None:
                text, role = opening + model.as_user_part(message.tokens), "user"
                opening = PromptText.special(merges)
            view = [*shown, *copies]
            [copy] = yield [Prefill(text, view, author=message.author, role=role, source=branch, adapter=adapter)]
            owned.add([copy])
            copies.append(copy)
        return shown, copies

    def _summaries(self, branches: Sequence[MessageHandle], ask: str, owned: Leases) -> Plan[list[MessageHandle]]:
        """Summarize each branch by its own author, after all that it has seen and said."""
        chat = self._tenant.core.model.chat
        workers = [self._original_and_adapter(branch) for branch in branches]
        views: list[tuple[list[MessageHandle], list[int | None], int]] = []
        for branch in branches:
            handles, starts = zip(*self._view_of(branch, owned.scope), strict=True)
            owned.add(handles[:-1])
            end = max(offset + handle.length for handle, offset in zip(handles, starts, strict=True))
            views.append(([*handles], [*starts], end))
        turn, pairs = chat.turn("user", ask), zip(views, workers, strict=True)
        questions = yield [Prefill(turn, *view, role="user", adapter=encoder) for view, (_, encoder) in pairs]
        owned.add(questions)
        return (
            yield [
                Decode(
                    msg.tokens[: msg.header] if msg.chosen is not None else chat.header(msg.author, thinking=False),
                    [*view, question],
                    [*offsets, end],
                    end + question.length,
                    # Greedy, so that a node that runs again gets the same summaries.
                    Sampling(temperature=0.0, max_tokens=branch.length),
                    author=msg.author,
                    turn_suffix=chat.turn_end,
                    adapter=encoder,
                )
                for branch, question, (view, offsets, end), (msg, encoder) in zip(
                    branches, questions, views, workers, strict=True
                )
            ]
        )

    def _shared_trunk(self, branches: Sequence[MessageHandle], scope: Scope | None) -> list[MessageHandle]:
        """Return the messages that all branches' views start with, each with a new lease to be released."""
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

    def _view_of(self, branch: MessageHandle, scope: Scope | None) -> list[tuple[MessageHandle, int]]:
        """Return a branch's view and itself last, with positions; all but itself with a new lease to be released."""
        with self._tenant.core.lock:
            message = _original(self._tenant.find(branch))
            handles = self._lease(message.parents, scope)
            start = message.native_offset
            offsets = [start + offset for offset in message.relative_offsets]
            return [*zip(handles, offsets, strict=True), (branch, start)]

    def _attach(self, sources: Sequence[MessageHandle], copies: Sequence[MessageHandle], scope: Scope | None) -> None:
        """Let copies live as long as their sources: their maker's leases become the sources'.

        If the maker's scope has ended meanwhile, its leases have, too; those of others are left alone.

        Raises:
            HandleError: A source was released meanwhile; nothing is kept.
        """
        with self._tenant.core.lock:
            if scope is not None and scope.closed:
                return
            table, copied = self._tenant.core.table, [self._tenant.find(copy) for copy in copies]
            try:
                originals = [self._tenant.find(source) for source in sources]
            except HandleError:
                for copy in copied:
                    table.release(copy, scope)
                raise
            for source, copy in zip(originals, copied, strict=True):
                table.keep(source, copy, scope)

    def _original_and_adapter(self, branch: MessageHandle) -> tuple[Message, str]:
        """Return a branch's original message, and the name of the adapter that encoded it."""
        with self._tenant.core.lock:
            message = _original(self._tenant.find(branch))
            return message, self._tenant.core.adapters.name_of(message.lineage.adapter, self._tenant.name) or BASE

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
