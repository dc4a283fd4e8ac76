"""Anything in any order, in a memory of a few hundred tokens: what is still leased reads as in a fresh engine."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.exact import TOLERANCE
from support.faults import InjectedError, any_fault
from support.oracle import Oracle, OracleMessage
from support.tiny import save_tiny_llama

from choreo_agents import Decode, Engine, Memory, MessageHandle, Sampling, Scheduling
from choreo_agents.engine.adapters import Loaded
from choreo_agents.errors import CapacityError, EngineFailedError, KVBudgetError, ReleasedHandleError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.sampling import TokenSampler
from choreo_agents.synthesis.mapper import CacheMapper

BUDGET = 320
"""Tokens."""
MOST_PINNED = 96
seeds = st.integers(0, 10**6)
_shared: dict[str, Any] = {}


def shared() -> tuple[LoadedModel, Oracle]:
    """The tiny model and its oracle, loaded once."""
    if not _shared:
        folder = save_tiny_llama(Path(tempfile.mkdtemp(prefix="choreo-machine-")))
        _shared.update(model=load_model(folder), oracle=Oracle(folder))
        shutil.rmtree(folder)
    return _shared["model"], _shared["oracle"]


def where_there_are(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A rule that does nothing while its machine has none of these.

    No precondition: those decide what Hypothesis draws next, which has to be the same for the same draws. What there
    is depends on the engine's thread, too: on what it had done when a fault met it, or when memory was asked for.
    """

    def only(body: Callable[..., None]) -> Callable[..., None]:
        @wraps(body)
        def ruled(self: Machine, **drawn: Any) -> None:
            if getattr(self, what):
                body(self, **drawn)

        return ruled

    return only


class Machine(RuleBasedStateMachine):
    """An engine with little memory, and the lineage of every message it has made."""

    @initialize(
        tiers=st.sampled_from(["none", "host", "disk", "both", "kept", "all"]),
        step_tokens=st.sampled_from([512, 7]),
    )
    def start(self, tiers: str, step_tokens: int) -> None:
        model, self.oracle = shared()
        self.token = model.adapter.geometry.bytes_per_token
        self.folder = Path(tempfile.mkdtemp(prefix="choreo-tier-"))
        self.engine = Engine.load(
            model,
            memory=Memory(
                kv_budget_bytes=BUDGET * self.token,
                host_bytes=100 * self.token if tiers in ("host", "both", "all") else 0,
                disk=self.folder if tiers in ("disk", "both", "all") else None,
                persist_dir=self.folder if tiers in ("kept", "all") else None,
                persist_bytes=200 * self.token,
            ),
            scheduling=Scheduling(max_batched_tokens=step_tokens),
            salt="machine",
        )
        # One that changes nothing: a copy reads as its source does.
        mapper = CacheMapper(model.adapter.geometry, model.adapter.kinds)
        self.engine._core.adapters.add_default(Loaded(Path("zero"), None, mapper, mapper.fingerprint))
        self.copies: dict[MessageHandle, MessageHandle] = {}
        """Mapped copies by their sources, with which they go."""
        self.made: dict[MessageHandle, OracleMessage] = {}
        self.leases: Counter[MessageHandle] = Counter()
        self.pins: Counter[MessageHandle] = Counter()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for handle in [*self.leases, *self.copies.values()]:
            self.require_as_in_a_fresh_engine(handle)
        for handle, count in self.leases.items():
            for _ in range(count):
                self.engine.release(handle)
        self.flush()
        assert self.engine.stats().kv_bytes == self.engine.stats().host_bytes == self.engine.stats().messages == 0
        self.engine.check()
        self.engine.close()
        shutil.rmtree(self.folder)

    @rule(seed=seeds, lazy=st.booleans())
    def prefill(self, seed: int, lazy: bool) -> None:
        rng = Random(seed)
        view, offsets, start = self.draw_view(rng)
        content = draw_tokens(rng, 1, 50)
        handle = self.tried(lambda: self.engine.prefill(content, view, offsets, start, lazy=lazy))
        self.remember(handle, content, view, offsets, start)

    @rule(seed=seeds, branches=st.integers(1, 4))
    def decode(self, seed: int, branches: int) -> None:
        rng = Random(seed)
        calls, drawn = [], []
        for _ in range(branches):
            (view, offsets, start), header, rest = self.draw_view(rng), draw_tokens(rng, 1, 9), draw_tokens(rng, 1, 20)
            calls.append(
                Decode(header, view, offsets, start, sampling=Sampling(forced_token_ids=tuple(rest), seed=seed))
            )
            drawn.append((header + rest, view, offsets, start))
        handles = self.tried(lambda: self.engine.decode(calls))
        for handle, (content, view, offsets, start) in zip(handles or [], drawn, strict=False):
            self.remember(handle, content, view, offsets, start)

    @rule(seed=seeds, branches=st.integers(1, 5))
    def decode_under_a_fault(self, seed: int, branches: int) -> None:
        """Whatever fails, who has an answer has the right one, and who has none took nothing."""
        rng = Random(seed)
        calls, drawn = [], []
        for number in range(branches):
            (view, offsets, start), header, rest = self.draw_view(rng), draw_tokens(rng, 1, 9), draw_tokens(rng, 1, 20)
            sampling = Sampling(forced_token_ids=tuple(rest), seed=seed)
            calls.append(Decode(header, view, offsets, start, sampling=sampling, idempotency_key=f"{seed} {number}"))
            drawn.append((header + rest, view, offsets, start))
        with any_fault(self.engine, rng):
            came = [self.submitted(call) for call in calls]
            errors = [None if answer is None else answer.exception(60) for answer in came]
            while self.engine.stats().unfinished:
                pass
        for answer, error, each in zip(came, errors, drawn, strict=True):
            assert error is None or isinstance(error, EngineFailedError | CapacityError), error
            if answer is not None and error is None:
                self.remember(answer.result(), *each)

    def submitted(self, call: Decode) -> Any:
        """A call's answer to come; None if it failed, or was refused, before it was under way."""
        try:
            [answer] = self.engine._tenant.submit([call], None)
        except (KVBudgetError, InjectedError):
            return None
        return answer

    @rule(seed=seeds)
    def cancel(self, seed: int) -> None:
        rng = Random(seed)
        view, offsets, start = self.draw_view(rng)
        call = Decode([5], view, offsets, start, sampling=Sampling(forced_token_ids=tuple(draw_tokens(rng, 30, 40))))
        try:
            [answer] = self.engine._tenant.submit([call], None)
        except KVBudgetError:
            return
        for _ in range(rng.choice([0, 100, 10_000])):
            pass
        if not answer.cancel() and answer.exception() is None:
            self.engine.release(answer.result())
        while self.engine.stats().unfinished:
            pass

    @rule(seed=seeds)
    @where_there_are("leases")
    def release(self, seed: int) -> None:
        handle = Random(seed).choice(list(self.leases))
        if self.leases[handle] == 1:
            while self.pins[handle]:
                self.unpin(handle)
        self.engine.release(handle)
        self.leases[handle] -= 1
        self.leases += Counter()
        if handle not in self.leases:
            self.require_released(handle)
            copy = self.copies.pop(handle, None)
            if copy is not None:
                self.require_released(copy)

    @rule(seed=seeds, branches=st.integers(1, 3))
    @where_there_are("leases")
    def map(self, seed: int, branches: int) -> None:
        rng = Random(seed)
        sources = rng.choices(list(self.leases), k=branches)
        copies = self.tried(lambda: self.engine.branches.map(sources))
        for source, copy in zip(sources, copies or [], strict=False):
            assert self.copies.setdefault(source, copy) == copy
            self.made[copy] = self.made[source]

    @rule(seed=seeds, strategy=st.sampled_from(["parallel", "sequential", "text"]), mapped=st.booleans())
    @where_there_are("leases")
    def merge(self, seed: int, strategy: str, mapped: bool) -> None:
        """What is said is not read again: where it stands is another test's; that nothing of it stays is this one's."""
        rng = Random(seed)
        branches = rng.sample(list(self.leases), min(2, len(self.leases)))
        options: dict[str, Any] = {"strategy": strategy, "adapter": None if mapped else "base", "header": [5]}
        forced = Sampling(forced_token_ids=tuple(draw_tokens(rng, 1, 9)))
        merged = self.tried(lambda: self.engine.branches.merge(branches, [6, 7], sampling=forced, **options))
        if merged is not None:
            self.engine.release(merged)
        with self.engine._core.lock:
            for source in branches:  # some may have been mapped before memory refused the rest
                for copy in self.engine._tenant.find(source).copies:
                    self.copies[source] = copy.handle
                    self.made[copy.handle] = self.made[source]

    @rule(seed=seeds)
    @where_there_are("copies")
    def release_copy_early(self, seed: int) -> None:
        source = Random(seed).choice(list(self.copies))
        copy = self.copies.pop(source)
        self.engine.release(copy)
        self.require_released(copy)

    @rule(seed=seeds)
    @where_there_are("leases")
    def pin(self, seed: int) -> None:
        handle = Random(seed).choice(list(self.leases))
        if sum(h.length + 16 for h in {*self.pins, handle}) <= MOST_PINNED:
            self.engine.kv.pin(handle)
            self.pins[handle] += 1

    @rule(seed=seeds)
    @where_there_are("pins")
    def unpin_one(self, seed: int) -> None:
        self.unpin(Random(seed).choice(list(self.pins)))

    @rule()
    def park(self) -> None:
        self.engine.kv.offload()

    @rule(seed=seeds, waits=st.booleans(), again=st.booleans())
    def keep(self, seed: int, waits: bool, again: bool) -> None:
        handles = self.draw_view(Random(seed))[0]
        if again:
            self.engine.kv.unpersist(handles)
        self.engine.kv.persist(handles)
        if waits:
            self.flush()

    @rule(tokens=st.integers(1, BUDGET))
    def evict(self, tokens: int) -> None:
        with self.engine._core.lock:
            self.engine._core.cache.evict(tokens)

    @rule(seed=seeds)
    @where_there_are("leases")
    def read(self, seed: int) -> None:
        self.require_as_in_a_fresh_engine(Random(seed).choice([*self.leases, *self.copies.values()]))

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            stats = self.engine.stats()
            assert stats.leases == self.leases.total() + len(self.copies) and stats.unfinished == 0
            assert stats.kv_bytes <= BUDGET * self.token

    def require_released(self, handle: MessageHandle) -> None:
        with pytest.raises(ReleasedHandleError):
            self.engine.tokens(handle)

    def unpin(self, handle: MessageHandle) -> None:
        self.engine.kv.unpin(handle)
        self.pins[handle] -= 1
        self.pins += Counter()

    def flush(self) -> None:
        with suppress(InjectedError):  # a fault has met the writer
            self.engine.kv.flush()

    def draw_view(self, rng: Random) -> tuple[list[MessageHandle], list[int], int]:
        """A few leased messages and copies, anywhere."""
        there = [*self.leases, *self.copies.values()]
        view = rng.sample(there, rng.randint(0, min(3, len(there))))
        return view, [rng.randrange(150) for _ in view], rng.randrange(150)

    def tried(self, call: Any) -> Any:
        """The call's result; None if memory rightly refuses it."""
        try:
            return call()
        except KVBudgetError:
            return None
        except CapacityError:
            assert self.pins, "only pins may stand in the way"
            return None

    def remember(
        self,
        handle: MessageHandle | None,
        content: list[int],
        view: list[MessageHandle],
        offsets: list[int],
        start: int,
    ) -> None:
        if handle is None:
            return
        self.leases[handle] += 1
        if handle not in self.made:
            parents = [self.made[parent] for parent in view]
            self.made[handle] = self.oracle.encode(content, parents, offsets, start)

    def require_as_in_a_fresh_engine(self, handle: MessageHandle) -> None:
        """A decode that reads the message alone has the oracle's logits."""
        seen: list[torch.Tensor] = []
        shown = TokenSampler.show

        def listening(sampler: TokenSampler, logits: torch.Tensor) -> None:
            seen.append(logits.detach().clone())
            shown(sampler, logits)

        TokenSampler.show = listening  # type: ignore[method-assign]
        try:
            probe = self.tried(lambda: self.engine.decode([7, 8], [handle], sampling=Sampling(forced_token_ids=(9,))))
        finally:
            TokenSampler.show = shown  # type: ignore[method-assign]
        if probe is None:
            return
        self.engine.release(probe)
        wanted = self.oracle.logits(self.oracle.encode([7, 8], [self.made[handle]], [0], handle.length))[-1]
        error = (seen[-1] - wanted).abs().max().item()
        assert error <= TOLERANCE, f"logits differ by {error}"


def draw_tokens(rng: Random, low: int, high: int) -> list[int]:
    return [rng.randrange(3, 360) for _ in range(rng.randint(low, high))]


TestMachine = pytest.mark.timeout(900)(pytest.mark.slow(Machine.TestCase))
TestMachine.settings = settings(stateful_step_count=30, deadline=None)
