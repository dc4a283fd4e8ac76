"""The queue: who waits, in which order, and what being admitted takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from choreo_agents.errors import CapacityError, ChoreoError
from choreo_agents.kv.pool import KVPool
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import Waiting, place_in_queue


class Reclaimer(Protocol):
    """Gives cached memory back when requests need it. Called under the engine's lock."""

    def evictable_tokens(self) -> int: ...

    def evict(self, tokens: int) -> None:
        """Free cached segments until the pool has room for `tokens`, as far as possible."""
        ...

    def pinned(self, tenant: str) -> str:
        """Who keeps memory from being evicted, for a tenant to read: ` by 'alice' (96 tokens)`, or nothing."""
        ...


class Admission:
    """Requests that hold no memory yet. Used under the engine's lock.

    Args:
        pool: Where those that are admitted get their memory.
        reclaimer: Whose caches may be evicted for it.
        announce: Told of requests that are queued.
        fail: Told of requests that can never be admitted, and why; takes them out of the queue.
    """

    def __init__(
        self,
        pool: KVPool,
        reclaimer: Reclaimer,
        announce: Callable[[Request], None],
        fail: Callable[[Request, ChoreoError], None],
    ) -> None:
        self.waiting: list[Request] = []
        self._pool = pool
        self._reclaimer = reclaimer
        self._announce = announce
        self._fail = fail

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests behind those of their priority."""
        for request in requests:
            self._announce(request)
            self._place(request)

    def hurry(self, request: Request, priority: int) -> None:
        """Give a request that waits a higher priority, because somebody of that priority waits for it, too."""
        if priority > request.priority and request in self.waiting:
            self.waiting.remove(request)
            request.priority = priority
            self._place(request)

    def room(self) -> int:
        """Tokens that are free or can be evicted."""
        return self._pool.free_tokens + (self._reclaimer.evictable_tokens() if self.waiting else 0)

    def seen(self) -> list[Waiting]:
        """The queue as the scheduler sees it, once what has to come first was put in front.

        Only as far as its requests have room in the pool together: what the others read is not fetched yet.
        """
        seen: list[Waiting] = []
        claimed: set[object] = set()
        at = together = 0
        while at < len(self.waiting) and together <= self._pool.total_tokens:
            request = self.waiting[at]
            try:
                ready = request.encoding.ready()
                before = [] if ready else request.encoding.first(request)
            except ChoreoError as error:
                self._fail(request, error)
                continue
            if before:
                for r in before:
                    r.priority = request.priority
                    self._announce(r)
                self.waiting[at:at] = before
                continue
            behind = [r for r in request.encoding.awaits() if r in self.waiting[at + 1 :]]
            if behind:
                # What it reads is computed again for somebody who stands further back: now for it first.
                for r in behind:
                    self.waiting.remove(r)
                    r.priority = max(r.priority, request.priority)
                self.waiting[at:at] = behind
                continue
            room = self._pool.rounded(request.room()) + request.encoding.claimed_tokens(claimed)
            together += room
            after = () if ready else tuple(r.number for r in _followed(request))
            prompt = request.encoding.prompt_tokens()
            seen.append(Waiting(request.number, room, ready, prompt, after, request.priority, request.tenant))
            at += 1
        return seen

    def can_begin(self, request: Request, chunks: Mapping[int, int]) -> bool:
        """Whether nothing that a request waits for keeps it from a step.

        False if one admitted before it has begun to encode what it can reuse, or if what it follows on does not end in
        the step after all.

        Args:
            request: One of those that wait.
            chunks: Tokens of each request in the step.
        """
        if request.encoding.ready():
            return True
        followed = _followed(request)
        # One that was not admitted after all has no tokens to encode, and so not as many as were planned.
        return bool(followed) and all(chunks.get(each.number) == each.pending for each in followed)

    def admit(self, request: Request, *, alone: bool) -> bool:
        """Give a request that can begin its memory; it stays in the queue if there is no room for it now.

        Args:
            request: One of those that wait.
            alone: Nothing is running that would give memory back.
        """
        for reuse in (True, False):
            absent, prompt = request.encoding.pin(reuse=reuse)
            try:
                needed = prompt + (0 if request.decoding is None else request.decoding.longest)
                self._reclaimer.evict(self._pool.rounded(needed) + absent)
                binding = request.encoding.bind()
                segment = None if binding is None else self._pool.allocate(needed, binding.position, request.tenant)
            except BaseException:
                request.encoding.unpin()
                raise
            if binding is not None and segment is not None:
                break
            request.encoding.unpin()
            if not alone:
                return False
            # What it would reuse may itself be in the way.
        else:
            return False
        request.begin(binding, segment)
        self.waiting.remove(request)
        return True

    def _place(self, request: Request) -> None:
        at = place_in_queue(self.waiting, request.priority)
        for overtaken in self.waiting[at:]:
            overtaken.overtaken += 1
        self.waiting.insert(at, request)

    def no_room(self, request: Request) -> CapacityError:
        """Why a request cannot be admitted though nothing runs."""
        pool = self._pool
        wanted = pool.rounded(request.room()) + request.encoding.claimed_tokens(set())
        bytes_each = pool.geometry.bytes_per_token
        return CapacityError(
            f"the KV pool has no room for {wanted} tokens ({wanted * bytes_each} bytes): {pool.free_tokens} of "
            f"{pool.total_tokens} are free, and the rest is pinned{self._reclaimer.pinned(request.tenant)}. "
            "Unpin messages, or load the engine with a larger kv_budget_bytes"
        )


def _followed(request: Request) -> Sequence[Request]:
    """Those that it may share a step with though it reads what they encode; a mapper needs what it maps before."""
    return () if request.mapper else request.encoding.after()
