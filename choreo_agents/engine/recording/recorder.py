"""Records what an engine does for the runs of graphs in a block: `engine.record`."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.seals import Seals
from choreo_agents.engine.recording.digests import Digests
from choreo_agents.engine.recording.format import Line, RecordedMemory, RecordedStep, RecordingEnded, RecordingHeader
from choreo_agents.engine.recording.noted import NotedMessages
from choreo_agents.engine.recording.writing import RecordingFile, created
from choreo_agents.engine.taking_stock import stats_of
from choreo_agents.engine.tenant import Tenant
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.request import Request

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


class Recorder:
    """Of one block. May be used from any thread.

    Args:
        tenant: Whose calls are recorded.
        path: The file.
        digests: Makes those under a key.
        confidential: Whether confidential words are recorded.
    """

    def __init__(self, tenant: Tenant, path: Path, digests: Callable[[bytes], Digests], *, confidential: bool) -> None:
        self.path, self.confidential = path, confidential
        self._runs = itertools.count()
        self._tenant = tenant
        self._began_s = time.perf_counter()
        self._weigh_s = 0.0
        self.noted = NotedMessages(self.write)
        nonce, salted = secrets.token_hex(16), tenant.naming.salted
        key = salted_key(tenant.naming.seals, nonce) if salted else secrets.token_hex(32).encode()
        self.digests = digests(key)
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
        with core.lock:
            adapters, default = core.adapters.folders(tenant.name), core.adapters.loaded(tenant.name)[0]
        return RecordingHeader(
            model=core.model.name,
            fingerprint=core.model.adapter.fingerprint,
            method=core.settings.method,
            seed=core.settings.seed,
            bytes_per_token=core.model.adapter.geometry.bytes_per_token,
            adapters=adapters,
            adapter=None if default is None else default[0],
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

    def step(self, rows: Iterable[tuple[Request, int]]) -> None:
        """Write down a step that is about to run. Under the engine's lock, on its thread."""
        own = [count for request, count in rows if request.tenant == self._tenant.name]
        if own:
            self.write(RecordedStep(at_s=self.at_s(), rows=len(own), tokens=sum(own)))

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
    def __call__(self, path: str | Path, *, confidential: bool = False) -> Iterator[Recorder]:
        """Record all runs of graphs that are made inside the block, to be replayed or forked: off by default.

        The file is its user's alone. Digests in it are made under a key of the tenant's salt or, without one, under a
        random key in a file beside it, `PATH.key`: without the key nobody can guess what they are of, and nothing can
        be compared.

        Args:
            path: A file that is not there yet.
            confidential: Also what confidential agents say, and thoughts. Else neither words nor tokens of these are in
                the file: a replay decodes them again with their seed, and compares digests.

        Raises:
            InvalidRequestError: The file is there, or something is being recorded.
        """
        tenant, core, ongoing = self._tenant, self._tenant.core, self._tenant.keeper(_Ongoing)
        with core.lock:
            if ongoing.recorder is not None:
                raise InvalidRequestError(f"the engine is recording to {str(ongoing.recorder.path)!r}: end that first")
            recorder = ongoing.recorder = Recorder(tenant, Path(path), self.digests, confidential=confidential)
            watches, watch = core.loop.watches, recorder.step
            watches.append(watch)
        try:
            yield recorder
        finally:
            with core.lock:
                ongoing.recorder = None
                ongoing.digests.pop(recorder.digests.key, None)
                watches.remove(watch)
                recorder.close()

    @property
    def under_way(self) -> Recorder | None:
        """What records now; None: nothing does."""
        return self._tenant.keeper(_Ongoing).recorder

    def digests(self, key: bytes) -> Digests:
        """Of this engine's messages, under a recording's key."""
        with self._tenant.core.lock:
            return self._tenant.keeper(_Ongoing).digests.setdefault(key, Digests(key, self._tenant.find))

    def drop_digests(self, key: bytes) -> None:
        """Forget what they have seen."""
        with self._tenant.core.lock:
            self._tenant.keeper(_Ongoing).digests.pop(key, None)

    def encoder(self, adapter: str | None) -> list[str]:
        """Fingerprints of the model, and of the adapter and mapper of this name, or that calls have by default."""
        core, own = self._tenant.core, self._tenant.name
        return [
            core.model.adapter.fingerprint,
            core.adapters.lora_key(adapter, own),
            core.adapters.mapper_key(adapter, own),
        ]

    def messages(self, handles: Iterable[MessageHandle]) -> list[Message]:
        """What handles are of."""
        return [self._tenant.find(handle) for handle in handles]


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
