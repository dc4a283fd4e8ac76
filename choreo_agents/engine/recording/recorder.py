"""Records what an engine does for the runs of graphs in a block: `engine.record`."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from choreo_agents.engine.messages.from_cache import FromCache
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.seals import Seals
from choreo_agents.engine.pending import Pending
from choreo_agents.engine.recording.conditions import conditions_of
from choreo_agents.engine.recording.digests import Digests, LogitsDigests
from choreo_agents.engine.recording.format import Line, RecordedMemory, RecordedStep, RecordingEnded, RecordingHeader
from choreo_agents.engine.recording.noted import NotedMessages
from choreo_agents.engine.recording.writing import RecordingFile, created
from choreo_agents.engine.taking_stock import stats_of
from choreo_agents.engine.tenant import Tenant
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.timetable import Named, Timetable

PROOF = "key"
"""What a header's proof is of."""
_WEIGHED_EVERY_S = 0.02
"""How often it is written down how much KV lies where, at most."""


def key_path(path: Path) -> Path:
    """Where the key of a recording lies whose tenant has no salt."""
    return path.with_name(f"{path.name}.key")


def salted_key(seals: Seals, nonce: str) -> bytes:
    """The key of a recording whose tenant has one."""
    return seals.seal("recording", nonce).encode()


class StepNames:
    """What requests are called in a timetable: by all that they encode and attend to, so that no two are mixed up.

    Args:
        digests: Under the recording's key.
    """

    def __init__(self, digests: Digests) -> None:
        self._digests = digests

    def __call__(self, request: Named) -> str:
        if not isinstance(request, Request):
            return request.label
        owner, encoding = request.owner, request.encoding
        lineage = encoding.lineage if isinstance(encoding, FromCache) else None
        lineage = owner.lineage if isinstance(owner, Pending) else lineage
        assert lineage is not None, "a request encodes a message"
        # Not its label: that tells who was the first to ask for what it reads.
        place = None if request.decoding is None else request.decoding.place
        return self._digests.of("request of a step", [self._digests.lineage(lineage), place])[:16]


class Recorder:
    """Of one block. May be used from any thread.

    Args:
        tenant: Whose calls are recorded.
        path: The file.
        digests: Makes those under a key.
        bits: Whether logits and steps are recorded, too.
        confidential: Whether confidential words are.
    """

    def __init__(
        self, tenant: Tenant, path: Path, digests: Callable[[bytes], Digests], *, bits: bool, confidential: bool
    ) -> None:
        self.path, self.bits, self.confidential = path, bits, confidential
        self._runs = itertools.count()
        self._tenant = tenant
        self._began_s = time.perf_counter()
        self._weigh_s = 0.0
        self.noted = NotedMessages(self.write)
        nonce, salted = secrets.token_hex(16), tenant.naming.salted
        key = salted_key(tenant.naming.seals, nonce) if salted else secrets.token_hex(32).encode()
        self.digests = digests(key)
        self._names = Timetable(named=StepNames(self.digests))
        with ExitStack() as undo:
            self._file = RecordingFile(path)
            undo.callback(self._file.discard)
            if not salted:
                _keep(key_path(path), key)
                undo.callback(key_path(path).unlink)
            self.write(self._header(nonce, salted))
            undo.pop_all()

    def _header(self, nonce: str, salted: bool) -> RecordingHeader:
        tenant, core = self._tenant, self._tenant.core
        scheduling, memory = core.settings.scheduling, core.settings.memory
        with core.lock:
            adapters, default = core.adapters.folders(tenant.name), core.adapters.loaded(tenant.name)[0]
        return RecordingHeader(
            model=core.model.name,
            conditions=conditions_of(core),
            seed=core.settings.seed,
            step_tokens=scheduling.step_tokens,
            rows=scheduling.rows,
            kv_budget_bytes=memory.kv_budget_bytes,
            bytes_per_token=core.model.adapter.geometry.bytes_per_token,
            adapters=adapters,
            adapter=None if default is None else default[0],
            bits=self.bits,
            confidential=self.confidential,
            keyed="salt" if salted else "file",
            nonce=nonce,
            proof=self.digests.of(PROOF, nonce),
        )

    def begin_run(self) -> int:
        """The number of the next run."""
        return next(self._runs)

    def at_s(self, counted_s: float | None = None) -> float:
        """Seconds since it began, now or as `time.perf_counter` has counted."""
        return (time.perf_counter() if counted_s is None else counted_s) - self._began_s

    def write(self, line: Line) -> None:
        """Add a line to the file."""
        self._file.write(line)

    def logits(self) -> LogitsDigests | None:
        """What looks at a decode's logits, if they are recorded."""
        return LogitsDigests(self.digests) if self.bits else None

    def step(self, rows: Iterable[tuple[Request, int]]) -> None:
        """Write down a step that is about to run. Under the engine's lock, on its thread."""
        rows = list(rows)
        own = [(request, count) for request, count in rows if request.tenant == self._tenant.name]
        named = tuple((*self._names.name(request), count) for request, count in own)
        self.write(RecordedStep(rows=named, others=len(own) < len(rows), at_s=self.at_s()))

    def memory(self, *, at_any_rate: bool = False) -> None:
        """Write down how much of the tenant's KV lies where, unless that was done just before."""
        with self._tenant.core.lock:
            now = self.at_s()
            if now < self._weigh_s and not at_any_rate:
                return
            held = stats_of(self._tenant.core, self._tenant.name)
            # Looking at many messages takes a while, and is not to slow down who makes them.
            self._weigh_s = now + max(_WEIGHED_EVERY_S, 50 * (self.at_s() - now))
        tiers = {"device_bytes": held.kv_bytes, "host_bytes": held.host_bytes, "disk_bytes": held.disk_bytes}
        self.write(RecordedMemory(at_s=now, **tiers))

    def close(self) -> None:
        """End the file."""
        self.write(RecordingEnded())
        self._file.close()


class Recordings:
    """`engine.record`: what a tenant records.

    Args:
        tenant: Which.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    @contextmanager
    def __call__(self, path: str | Path, *, bits: bool = False, confidential: bool = False) -> Iterator[Recorder]:
        """Record all runs of graphs that are made inside the block, to be replayed or forked: off by default.

        The file is its user's alone. Digests in it are made under a key of the tenant's salt or, without one, under a
        random key in a file beside it, `PATH.key`: without the key nobody can guess what they are of, and nothing can
        be compared but readable words.

        Args:
            path: A file that is not there yet.
            bits: With a digest of the logits of each step, and the steps, so that a replay can compare bit by bit. The
                engine must have run nothing before, and serve nobody else meanwhile.
            confidential: Also what confidential agents say, and thoughts. Else neither words nor tokens of these are in
                the file: a replay decodes them again with their seed, and compares digests.

        Raises:
            InvalidRequestError: The file is there, something is being recorded, or bits cannot be compared any more.
        """
        tenant, core, ongoing = self._tenant, self._tenant.core, self._tenant.keeper(_Ongoing)
        with core.lock:
            if ongoing.recorder is not None:
                raise InvalidRequestError(f"the engine is recording to {str(ongoing.recorder.path)!r}: end that first")
            if bits and stats_of(core).steps:
                raise InvalidRequestError(
                    f"the engine has run {stats_of(core).steps} steps before, which no replay would: record bits on an "
                    "engine that was just loaded"
                )
            if bits and core.loop.own_steps().planner.watch is not None:
                raise InvalidRequestError(
                    "another tenant of the engine is recording bits: they are those of an engine that serves one tenant"
                )
            recorder = ongoing.recorder = Recorder(
                tenant, Path(path), self.digests, bits=bits, confidential=confidential
            )
            if bits:
                loop = core.loop.own_steps()
                loop.planner.watch = recorder.step
                loop.executor.forward.goes_ahead = False  # its replay does not, either
        try:
            yield recorder
        finally:
            with core.lock:
                ongoing.recorder = None
                ongoing.digests.pop(recorder.digests.key, None)
                if bits:
                    loop = core.loop.own_steps()
                    loop.planner.watch = None
                    loop.executor.forward.goes_ahead = core.settings.scheduling.goes_ahead
                recorder.close()

    @property
    def under_way(self) -> Recorder | None:
        """What records now; None: nothing does."""
        return self._tenant.keeper(_Ongoing).recorder

    def digests(self, key: bytes) -> Digests:
        """Of this engine's messages, under a recording's key."""
        with self._tenant.core.lock:
            return self._tenant.keeper(_Ongoing).digests.setdefault(key, Digests(key, self._tenant.find))

    def messages(self, handles: Iterable[MessageHandle]) -> list[Message]:
        """What handles are of."""
        return [self._tenant.find(handle) for handle in handles]

    def conditions(self) -> dict[str, str]:
        """What the bits of a run depend on, here and now."""
        return conditions_of(self._tenant.core)

    def copy_of(self, **changed: Any) -> dict[str, Any]:
        """What `Engine.load` takes for another engine like this one, over the same model."""
        settings = self._tenant.core.settings
        scheduling = settings.scheduling.model_copy(update={"timetable": changed.pop("timetable", None)})
        return {
            "method": settings.method,
            "memory": settings.memory.model_copy(update={"disk": None}),
            "scheduling": scheduling,
            "backend": settings.backend,
            "seed": settings.seed,
            **changed,
        }

    def share_adapters(self, other: Recordings) -> None:
        """Give another engine of the same model all adapters that this tenant's calls can name."""
        core, theirs = self._tenant.core, other._tenant
        with core.lock:
            default, named = core.adapters.loaded(self._tenant.name)
        with theirs.core.lock:
            theirs.core.adapters.take_over(default, named, theirs.name)


class _Ongoing:
    """What a tenant records now."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.digests: dict[bytes, Digests] = {}
        """By their keys: they remember what they have seen."""


def _keep(path: Path, key: bytes) -> None:
    file = created(path)
    try:
        os.write(file, key + b"\n")
    finally:
        os.close(file)
