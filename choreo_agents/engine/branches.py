"""Branches: mapping what parallel calls said, and merging it into one message (Parallel-Synthesis).

From their caches, mapped or as they are, or from their words.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

from choreo_agents.engine.adapters import BASE
from choreo_agents.engine.calling import CallLimits, Plan, Tenant
from choreo_agents.engine.calls import Calls, Content, Decode, Prefill
from choreo_agents.engine.messages.message import Message, Scope
from choreo_agents.errors import HandleError, InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, LoadedModel, PromptText
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.placing import Strategy, anchored, require_strategy

T = TypeVar("T")
SHORTER = "Say what you found, shorter."
"""What workers are asked for a summary."""


@dataclass(frozen=True)
class MergedView:
    """What a synthesizer attends to, and where; as arguments of `decode` and its kin."""

    handles: list[MessageHandle]
    offsets: list[int | None]
    end: int
    """Where the synthesizer's own message starts."""
    made: list[MessageHandle] = field(default_factory=list)
    """Messages that were encoded for this view alone: to be released after its use."""


class Branches:
    """What an engine does with messages that stand beside each other: `engine.branches`.

    Every sync call does what its async form does. Both follow a generator, which yields what has to be done, is sent
    what came of it, and returns what it is for; its scope takes all leases. If it ends meanwhile, they end with it.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    async def amap(self, handles: Sequence[MessageHandle], adapter: str | None = None) -> list[MessageHandle]:
        """See `map`."""
        return await self._tenant.arun(self._plan(self._mapped, handles, adapter))

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
        return self._tenant.run(self._plan(self._mapped, handles, adapter))

    def maps(self, adapter: str | None = None) -> bool:
        """Tell whether an adapter has a cache mapper, and the engine caches for it to map.

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
        core = self._tenant.core
        with core.lock:
            if not (core.adapters.find(adapter, self._tenant.name).boundaries and core.method.keeps_kv):
                return []
            said = [self._tenant.find(branch).tokens for branch in branches]
        openings = [core.model.opening(tokens) for tokens in said]
        if not all(openings):
            return []
        ends = [at + handle.length for handle, at in zip(trunk, offsets, strict=True)]
        calls: list[Prefill] = []
        for opening, branch, anchor in zip(openings, branches, anchors, strict=True):
            start = min(anchor, max(ends, default=0))
            seen = [(handle, at) for handle, at, end in zip(trunk, offsets, ends, strict=True) if end <= start]
            handles, places = [handle for handle, _ in seen], [at for _, at in seen]
            calls.append(Prefill(opening, [*handles, branch], [*places, start], start + branch.length, adapter=adapter))
        return calls

    async def asummaries(self, branches: Sequence[MessageHandle], ask: str = SHORTER) -> list[MessageHandle]:
        """See `summaries`."""
        return await self._tenant.arun(self._plan(self._summed_up, branches, ask))

    def summaries(self, branches: Sequence[MessageHandle], ask: str = SHORTER) -> list[MessageHandle]:
        """What each branch's speaker says when asked to be short, after all that it has seen and said.

        Returns:
            Leased handles.
        """
        return self._tenant.run(self._plan(self._summed_up, branches, ask))

    async def amerge(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MessageHandle:
        """See `merge`."""
        return await self._tenant.arun(*self._merging(self._merged, branches, prompt, **options))

    def merge(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MessageHandle:
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
            sampling: How tokens are chosen; `idempotency_key` and `confidential` as for `decode`.
            priority: Of all calls that this takes; `timeout_s`: of all of them together.
            summary: What workers are asked under `summary`.

        Returns:
            A leased handle of what the synthesizer said.

        Raises:
            InvalidRequestError: No branch, no such strategy, or it can never fit.
            AdapterError: There is no such adapter.
            HandleError: A branch is unknown, released, or another model's or tenant's.
        """
        return self._tenant.run(*self._merging(self._merged, branches, prompt, **options))

    async def aview(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MergedView:
        """See `view`."""
        return await self._tenant.arun(*self._merging(self._viewed, branches, prompt, **options))

    def view(self, branches: Sequence[MessageHandle], prompt: Content = "", **options: Any) -> MergedView:
        """What `merge` would decode over, ready for `stream` or several decodes. Arguments as for `merge`."""
        return self._tenant.run(*self._merging(self._viewed, branches, prompt, **options))

    def _merging(
        self,
        steps: Callable[..., Generator[Calls, list[MessageHandle], T]],
        *args: Any,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> tuple[Plan[T], CallLimits]:
        return self._plan(steps, *args, **options), CallLimits(priority, timeout_s)

    def _plan(
        self, steps: Callable[..., Generator[Calls, list[MessageHandle], T]], *args: Any, **options: Any
    ) -> Plan[T]:
        return lambda scope: steps(scope, *args, **options)

    def _merged(
        self,
        scope: Scope | None,
        /,
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
    ) -> Generator[Calls, list[MessageHandle], MessageHandle]:
        """To what was said. Arguments as for `Branches.merge`."""
        chat = self._tenant.core.model.chat
        view = yield from self._viewed(
            scope, branches, prompt, trunk=trunk, strategy=strategy, adapter=adapter, author=author, summary=summary
        )
        try:
            start = chat.header(author, thinking=options.get("thinking") is not None) if header is None else header
            call = Decode(
                start,
                view.handles,
                view.offsets,
                view.end,
                sampling or Sampling(),
                author=author,
                turn_suffix=chat.turn_end,
                adapter=adapter,
                **options,
            )
            [merged] = yield [call]
        finally:
            self._give_back(view.made, scope)
        return merged

    def _viewed(
        self,
        scope: Scope | None,
        /,
        branches: Sequence[MessageHandle],
        prompt: Content,
        *,
        trunk: Sequence[MessageHandle] | None = None,
        strategy: Strategy = "parallel",
        adapter: str | None = None,
        author: str | None = None,
        summary: str = SHORTER,
    ) -> Generator[Calls, list[MessageHandle], MergedView]:
        """To what it is said over."""
        require_strategy(strategy)
        branches = listed(branches, "branches")
        if not branches:
            raise InvalidRequestError("there is no branch to merge: give a list of one at least")
        tenant, made = self._tenant, list[MessageHandle]()
        try:
            shared = self._shared_trunk(branches, scope) if trunk is None else listed(trunk, "trunk")
            made += shared if trunk is None else []
            depths = self._depths(branches, shared)
            if strategy == "summary":
                branches = yield from self._summaries(scope, branches, summary, made)
                made += branches
            shown, merges = list(branches), tenant.core.model.chat.merges is not None
            if strategy == "text" and merges:
                shared, shown = yield from self._told(branches, shared, adapter, made)
            elif strategy == "text":
                shown = yield from self._again(branches, shared, adapter, made)
            elif self.maps(adapter):
                shown = yield from self._mapped(scope, branches, adapter)
            placed = anchored(strategy, [h.length for h in shared], [h.length for h in shown], depths)
            handles, offsets = [*shared, *shown], list[int | None]([*placed.trunk, *placed.branches])
            end = placed.end
            behind: list[Prefill] = []
            if strategy != "text":
                behind = self.boundaries(shown, shared, placed.trunk, placed.branches, adapter)
            if behind:
                starts = yield behind
                made += starts
                handles += starts
                offsets += [at + branch.length for at, branch in zip(placed.branches, shown, strict=True)]
            asker = f"{author}.system" if author else None
            for words in _asked(tenant.core.model.chat, prompt, goes_on=strategy == "text" and merges):
                [asked] = yield [Prefill(words, handles, offsets, end, asker, "user", adapter=adapter)]
                made.append(asked)
                handles, offsets, end = [*handles, asked], [*offsets, end], end + asked.length
            return MergedView(handles, offsets, end, made)
        except BaseException:
            self._give_back(made, scope)
            raise

    def _mapped(
        self, scope: Scope | None, handles: Sequence[MessageHandle], adapter: str | None
    ) -> Generator[Calls, list[MessageHandle], list[MessageHandle]]:
        """To copies by an adapter's cache mapper, which live as long as their sources."""
        sources = listed(handles, "handles")
        said = [self._tenant.find(source) for source in sources]
        calls = [
            Prefill(each.tokens, [source], author=each.author, role=each.role, adapter=adapter, maps=True)
            for source, each in zip(sources, said, strict=True)
        ]
        copies = (yield calls) if calls else []
        self._keep(sources, copies, scope)
        return copies

    def _summed_up(
        self, scope: Scope | None, branches: Sequence[MessageHandle], ask: str
    ) -> Generator[Calls, list[MessageHandle], list[MessageHandle]]:
        """To what each branch's speaker says when it is asked to be short."""
        made: list[MessageHandle] = []
        try:
            return (yield from self._summaries(scope, listed(branches, "branches"), ask, made))
        finally:
            self._give_back(made, scope)

    def _again(
        self,
        branches: Sequence[MessageHandle],
        trunk: Sequence[MessageHandle],
        adapter: str | None,
        made: list[MessageHandle],
    ) -> Generator[Calls, list[MessageHandle], list[MessageHandle]]:
        """The branches' words, each encoded after the trunk and those before it."""
        copies: list[MessageHandle] = []
        for branch in branches:
            said = self._tenant.find(branch)
            words, seen = said.tokens, [*trunk, *copies]
            call = Prefill(words, seen, author=said.author, role=said.role, source=branch, adapter=adapter)
            [copy] = yield [call]
            copies.append(copy)
            made.append(copy)
        return copies

    def _told(
        self,
        branches: Sequence[MessageHandle],
        trunk: Sequence[MessageHandle],
        adapter: str | None,
        made: list[MessageHandle],
    ) -> Generator[Calls, list[MessageHandle], tuple[list[MessageHandle], list[MessageHandle]]]:
        """The same in one user's turn, where users and model take turns: that which the trunk ends with, if it does.

        Returns:
            The trunk, whose last message is encoded again if its turn goes on, and the branches' words.
        """
        model, seen = self._tenant.core.model, list(trunk)
        opening, copies = PromptText.special(model.chat.user.plain), list[MessageHandle]()
        if seen and (asked := _unclosed(model, (last := self._tenant.find(seen[-1])).tokens)) is not None:
            opening = PromptText.special(str(model.chat.merges))
            if len(asked) < len(last.tokens):
                _, encoder = self._speaker(seen[-1])
                call = Prefill(asked, seen[:-1], author=last.author, role=last.role, source=seen[-1], adapter=encoder)
                [seen[-1]] = yield [call]
                made.append(seen[-1])
        for branch in branches:
            said = self._tenant.find(branch)
            words = opening + model.part_of(said.tokens)
            call = Prefill(words, [*seen, *copies], author=said.author, role="user", source=branch, adapter=adapter)
            copies += yield [call]
            made.append(copies[-1])
            opening = PromptText.special(str(model.chat.merges))
        return seen, copies

    def _summaries(
        self, scope: Scope | None, branches: Sequence[MessageHandle], ask: str, made: list[MessageHandle]
    ) -> Generator[Calls, list[MessageHandle], list[MessageHandle]]:
        """What each branch's worker says when it is asked to be short: after all that it has seen and said."""
        chat = self._tenant.core.model.chat
        workers = [self._speaker(branch) for branch in branches]
        views: list[tuple[list[MessageHandle], list[int | None], int]] = []
        for branch in branches:
            seen, starts = zip(*self._view_of(branch, scope), strict=True)
            made += seen[:-1]
            end = max(offset + handle.length for handle, offset in zip(seen, starts, strict=True))
            views.append(([*seen], [*starts], end))
        turn, each = chat.turn("user", ask), zip(views, workers, strict=True)
        asked = yield [Prefill(turn, *view, role="user", adapter=encoder) for view, (_, encoder) in each]
        made += asked
        return (
            yield [
                Decode(
                    said.tokens[: said.header] if said.chosen is not None else chat.header(said.author, thinking=False),
                    [*seen, question],
                    [*offsets, end],
                    end + question.length,
                    # The likeliest words: a node that runs again has the same summaries.
                    Sampling(temperature=0.0, max_tokens=branch.length),
                    author=said.author,
                    turn_suffix=chat.turn_end,
                    adapter=encoder,
                )
                for branch, question, (seen, offsets, end), (said, encoder) in zip(
                    branches, asked, views, workers, strict=True
                )
            ]
        )

    def _give_back(self, handles: Sequence[MessageHandle], scope: Scope | None) -> None:
        """Drop leases that were taken in a scope; if it has ended meanwhile, they ended with it."""
        for handle in handles if scope is None or not scope.closed else ():
            with suppress(HandleError):
                self._tenant.release(handle, scope, keep_last=False)

    def _shared_trunk(self, branches: Sequence[MessageHandle], scope: Scope | None) -> list[MessageHandle]:
        """What all branches see from the start of their views on, each with a new lease: to be released."""
        with self._tenant.core.lock:
            views = [_original(self._tenant.find(branch)).parents for branch in branches]
            alike = takewhile(lambda each: len(set(map(id, each))) == 1, zip(*views, strict=False))
            return self._leased([each[0] for each in alike], scope)

    def _depths(self, branches: Sequence[MessageHandle], trunk: Sequence[MessageHandle]) -> list[int]:
        """How many trunk messages each branch had seen when it was encoded; of one that saw none of them, all.

        Raises:
            HandleError: One of them is unknown, released, or another model's.
        """
        with self._tenant.core.lock:
            found: list[int] = []
            shared = [self._tenant.find(handle) for handle in trunk]
            for branch in branches:
                seen = set(self._tenant.find(branch).ancestors())
                deepest = [place for place, message in enumerate(shared, start=1) if message in seen]
                found.append(max(deepest, default=len(trunk)))
            return found

    def _view_of(self, branch: MessageHandle, scope: Scope | None) -> list[tuple[MessageHandle, int]]:
        """What a branch attended to and itself last, with offsets; all but itself with a new lease: to be released."""
        with self._tenant.core.lock:
            said = _original(self._tenant.find(branch))
            seen = self._leased(said.parents, scope)
            start = said.native_offset
            offsets = [start + offset for offset in said.relative_offsets]
            return [*zip(seen, offsets, strict=True), (branch, start)]

    def _keep(self, sources: Sequence[MessageHandle], copies: Sequence[MessageHandle], scope: Scope | None) -> None:
        """Let copies live as long as their sources: the leases that their maker has are the sources' from now on.

        If the maker's scope has ended meanwhile, its leases have, too: those of others are left to them.

        Raises:
            HandleError: A source was released meanwhile; nothing is kept.
        """
        with self._tenant.core.lock:
            if scope is not None and scope.closed:
                return
            table, made = self._tenant.core.table, [self._tenant.find(copy) for copy in copies]
            try:
                found = [self._tenant.find(source) for source in sources]
            except HandleError:
                for copy in made:
                    table.release(copy, scope)
                raise
            for source, copy in zip(found, made, strict=True):
                table.keep(source, copy, scope)

    def _speaker(self, branch: MessageHandle) -> tuple[Message, str]:
        """What a branch was as its speaker said it, and what a call names the adapter by that encoded it."""
        with self._tenant.core.lock:
            said = _original(self._tenant.find(branch))
            return said, self._tenant.core.adapters.name_of(said.lineage.adapter, self._tenant.name) or BASE

    def _leased(self, messages: Sequence[Message], scope: Scope | None) -> list[MessageHandle]:
        for message in messages if scope is None or not scope.closed else ():
            self._tenant.core.table.lease(message, scope)
        return [message.handle for message in messages]


def _original(message: Message) -> Message:
    """What a mapped copy is a copy of; any other message itself."""
    while message.lineage.mapper:
        [message] = message.parents
    return message


def _asked(chat: ChatFormat, prompt: Content, *, goes_on: bool) -> Iterator[Content]:
    """What is to be encoded of what a synthesizer is asked; `goes_on`: in a user's turn, which is open."""
    if goes_on and isinstance(prompt, str) and prompt:
        yield PromptText.special(str(chat.merges)) + chat.part(prompt) + PromptText.special(chat.user.after)
        return
    if goes_on and chat.user.after:
        yield chat.user.after
    if len(prompt):
        yield chat.turn("user", prompt) if isinstance(prompt, str) else prompt


def _unclosed(model: LoadedModel, tokens: Sequence[int]) -> Sequence[int] | None:
    """The tokens of a user's turn without those that close it; None: they are no such turn."""
    chat, closing = model.chat, model.encode(model.chat.user.after)
    openings = [model.encode(text) for text in (chat.user.plain, chat.bos + chat.user.plain) if text]
    if not any([*tokens[: len(opening)]] == opening for opening in openings):
        return None
    ended = [*tokens[len(tokens) - len(closing) :]] == closing
    return tokens[: len(tokens) - len(closing)] if ended else None


def listed(handles: Any, what: str) -> list[MessageHandle]:
    if isinstance(handles, MessageHandle | str) or not isinstance(handles, Iterable):
        raise InvalidRequestError(f"{what} must be a list of handles, not {handles!r}")
    return list(handles)
