"""Recorder of the runs of graphs in a block: `engine.record`.

Prompts and answers are identified by keyed digests: without the key, nobody can test guesses about their text.
"""

from __future__ import annotations

import hmac
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from choreo_agents.engine.calling import Tenant
from choreo_agents.engine.introspection import stats_of
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.seals import Seals, code
from choreo_agents.engine.recording.format import (
    Line,
    Origin,
    RecordedCall,
    RecordedMemory,
    RecordedMessage,
    RecordedStep,
    Recording,
    RecordingEnded,
    RecordingHeader,
)
from choreo_agents.errors import InvalidRequestError, ReplayError
from choreo_agents.kv.handle import MessageHandle, message_id
from choreo_agents.runtime.request import Request

_PROOF = "key"
"""Content of the header's proof."""
_WEIGHED_EVERY_S = 0.02
"""Least seconds between two records of memory."""
_SHORT = 16
"""Characters of a digest that names a message, or a part of a request."""


class Digests:
    """Digests under the key of one recording: equal for equal content in every run of a program that has the key.

    Args:
        key: Key of the recording.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._messages: WeakKeyDictionary[Message, str] = WeakKeyDictionary()

    def of(self, kind: str, content: Any) -> str:
        """Return the digest of JSON-plain content; `kind` separates kinds of content."""
        return code(self._key, kind, content)

    def request(
        self, view: Sequence[Message], offsets: Sequence[int], end: int, fields: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return a digest of each part of a call: its view, with lineage and positions, and the other fields it depends
        on."""
        messages = [self._message(message) for message in view]
        parts = {"view": [messages, [offset - end for offset in offsets]], **fields}
        return {name: self.of(name, part)[:_SHORT] for name, part in parts.items()}

    def name(self, message: Message) -> str:
        """Return the name of a message in the recording."""
        return self._message(message)[:_SHORT]

    def _message(self, message: Message) -> str:
        """Return the digest of a message's text and of all that its KV has attended to."""
        for source in message.unknown(self._messages.__contains__):
            lineage, parents = source.lineage, [self._messages[parent] for parent in source.parents]
            encoder = f"{lineage.adapter}~{lineage.mapper}"
            self._messages[source] = message_id(self._key, encoder, source.tokens, parents, source.relative_offsets)
        return self._messages[message]


class Recorder:
    """Recorder of one block: another thread writes its lines to a file that only the user can read.

    May be used from any thread, and by event loops. Each line is written at once: what was written survives a crash.

    Args:
        tenant: Tenant whose calls are recorded.
        path: The file.
        confidential: Whether confidential text is recorded.
    """

    def __init__(self, tenant: Tenant, path: Path, *, confidential: bool) -> None:
        self.path, self.confidential = path, confidential
        self.begin_run = itertools.count().__next__
        """Returns the number of the next run."""
        self.threads: set[tuple[str | None, ...]] = set()
        """Nodes of a graph and its thread, for each thread that a recorded run has begun."""
        self._tenant = tenant
        self._began_s = time.perf_counter()
        self._weigh_s = 0.0
        self._noted: set[str] = set()
        """Names of messages that have a line."""
        self._noting, self._lock = threading.Lock(), threading.Lock()
        self._lines: SimpleQueue[RecordingHeader | Line | None] = SimpleQueue()
        self._is_closed = False
        self._failure: Exception | None = None
        nonce, salted = secrets.token_hex(16), tenant.message_ids.salted
        key = _salted_key(tenant.message_ids.seals, nonce) if salted else secrets.token_hex(32).encode()
        self.digests = Digests(key)
        self._lines.put(self._header(nonce, salted))
        self._file = _created(path)
        if not salted:
            try:
                with open(_created(key_path(path)), "wb") as file:
                    file.write(key + b"\n")
            except BaseException:
                os.close(self._file)
                path.unlink()
                raise
        self._thread = threading.Thread(target=self._write, name="choreo-recording", daemon=True)
        self._thread.start()

    def _header(self, nonce: str, salted: bool) -> RecordingHeader:
        tenant, core = self._tenant, self._tenant.core
        with core.lock:
            adapters, default = core.adapters.folders(tenant.name), core.adapters.default
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
            proof=self.digests.of(_PROOF, nonce),
        )

    def at_s(self, counted_s: float | None = None) -> float:
        """Return the seconds since it began, now or at a time of `time.perf_counter`."""
        return max(0.0, (time.perf_counter() if counted_s is None else counted_s) - self._began_s)

    def write(self, line: Line) -> None:
        """Add a line to the file; ignored after `close`, since a run may outlive the block."""
        with self._lock:
            if not self._is_closed:
                self._lines.put(line)

    def call(
        self,
        view: Sequence[Message],
        answer: Message,
        thought: Message | None,
        times: tuple[float, float | None],
        sampled_tokens: Sequence[int],
        **fields: Any,
    ) -> None:
        """Record a call that has just been answered.

        Args:
            view: Messages of its view.
            answer: Its answer.
            thought: Message with its thoughts.
            times: Times of its submission and first token, in seconds of `time.perf_counter`.
            sampled_tokens: Its sampled tokens.
            fields: Other fields of its line.
        """
        usage, (submitted, first) = answer.usage, times
        self.write(
            RecordedCall(
                view=tuple(map(self._name, view)),
                view_tokens=sum(len(message.tokens) for message in view),
                answer=self._name(answer),
                thought=None if thought is None else self._name(thought),
                submitted_s=self.at_s(submitted),
                first_token_s=None if first is None else self.at_s(first),
                finished_s=self.at_s(),
                digest=self.digests.of("tokens", list(sampled_tokens)),
                tokens_encoded=usage.tokens_encoded,
                tokens_reused=usage.tokens_reused,
                tokens_recomputed=usage.tokens_recomputed,
                **fields,
            )
        )
        self.memory()

    def step(self, rows: Iterable[tuple[Request, int]]) -> None:
        """Record a step that is about to run. Called under the engine's lock, on its thread."""
        own = [count for request, count in rows if request.tenant == self._tenant.name]
        if own:
            self.write(RecordedStep(at_s=self.at_s(), rows=len(own), tokens=sum(own)))

    def memory(self, *, at_any_rate: bool = False) -> None:
        """Record how much of the tenant's KV is in each tier, unless that was done just before."""
        with self._tenant.core.lock:
            now = self.at_s()
            if now < self._weigh_s and not at_any_rate:
                return
            stats = stats_of(self._tenant.core, self._tenant.name)
            # Looking at many messages takes a while, and must not slow down the callers.
            self._weigh_s = now + max(_WEIGHED_EVERY_S, 50 * (self.at_s() - now))
        tiers = {"device_bytes": stats.kv_bytes, "host_bytes": stats.host_bytes, "disk_bytes": stats.disk_bytes}
        self.write(RecordedMemory(at_s=now, **tiers))

    def close(self) -> None:
        """Close the file when all is written; raise the error of a failed write, such as the `OSError` of a full
        disk."""
        with self._lock:
            self._is_closed = True
            self._lines.put(RecordingEnded())
            self._lines.put(None)
        self._thread.join()
        os.close(self._file)
        if self._failure is not None:
            raise self._failure

    def _name(self, message: Message) -> str:
        """Return the name of a message, after writing the lines of it and of its ancestors."""
        name = self.digests.name
        with self._noting:
            for source in message.unknown(lambda m: name(m) in self._noted):
                self._noted.add(name(source))
                self.write(
                    RecordedMessage(
                        name=name(source),
                        tokens=len(source.tokens),
                        parents=tuple(map(name, source.parents)),
                        role=source.role,
                        author=source.author,
                        origin=_origin(source),
                        position=source.native_offset,
                        offsets=source.relative_offsets,
                        sources=tuple(map(name, source.sources)),
                        confidential=source.confidential,
                    )
                )
            return name(message)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                data = memoryview(line.model_dump_json().encode() + b"\n")
                while data and self._failure is None:
                    data = data[os.write(self._file, data) :]
            except Exception as failure:
                self._failure = failure  # half a line may have been written, and nothing may follow it


class Recordings:
    """Recordings of a tenant: `engine.record`.

    Args:
        tenant: Tenant that records.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    @contextmanager
    def __call__(self, path: str | Path, *, confidential: bool = False) -> Iterator[Recorder]:
        """Record all runs of graphs that start inside the block, to be replayed or forked: off by default.

        Only the user can read the file. Its digests have a key derived from the tenant's salt or, without one, a random
        key in a file next to it, `PATH.key`: without the key nobody can test guesses about their content, and nothing
        can be compared.

        Args:
            path: A file that does not exist yet.
            confidential: Whether to record what confidential agents say, and thoughts. Else neither their text nor
                their tokens are in the file: a replay decodes them again with their seed, and compares digests.

        Raises:
            InvalidRequestError: The file exists, or another recording is running.
        """
        tenant, core = self._tenant, self._tenant.core
        with core.lock:
            if (ongoing := self.under_way) is not None:
                raise InvalidRequestError(f"the engine is already recording to {str(ongoing.path)!r}: end that first")
            recorder = tenant.recorder = Recorder(tenant, Path(path), confidential=confidential)
            watches, watch = core.loop.watches, recorder.step
            watches.append(watch)
        try:
            yield recorder
        finally:
            with core.lock:
                tenant.recorder = None
                watches.remove(watch)
                recorder.close()

    @property
    def under_way(self) -> Recorder | None:
        """Recorder that is running; None if there is none."""
        with self._tenant.core.lock:
            self._tenant.require_tenancy()
            recorder: Recorder | None = self._tenant.recorder
            return recorder

    def encoder(self, adapter: str | None) -> list[str]:
        """Return the fingerprints of the model, and of the adapter and mapper of this name or of the default."""
        core = self._tenant.core
        loaded = core.adapters.find(adapter, self._tenant.name)
        return [core.model.adapter.fingerprint, loaded.lora_key, loaded.mapper_key]

    def messages(self, handles: Iterable[MessageHandle]) -> list[Message]:
        """Return the messages of handles."""
        return [self._tenant.find(handle) for handle in handles]


def key_path(path: Path) -> Path:
    """Return the file with a recording's key, for a tenant without a salt."""
    return path.with_name(f"{path.name}.key")


def key_of(recording: Recording, seals: Seals) -> bytes:
    """Return the key of a recording's digests.

    Args:
        recording: The recording.
        seals: Seals of the tenant that made it.

    Raises:
        ReplayError: Its key file does not exist.
        InvalidRequestError: The tenant has another salt, or the file another key.
    """
    header, path = recording.header, key_path(recording.path)
    if header.keyed == "salt":
        key, where = _salted_key(seals, header.nonce), "it was recorded under another salt: load the engine with it"
    elif path.is_file():
        key, where = path.read_bytes().strip(), f"{str(path)!r} is the key of another recording"
    else:
        raise ReplayError(f"{path.name} is missing beside the recording: calls cannot be compared without it")
    if not hmac.compare_digest(code(key, _PROOF, header.nonce).encode(), header.proof.encode()):
        raise InvalidRequestError(f"cannot check the digests of {str(recording.path)!r}: {where}")
    return key


def _salted_key(seals: Seals, nonce: str) -> bytes:
    return seals.seal("recording", nonce).encode()


def _origin(message: Message) -> Origin:
    if message.lineage.mapper:
        return "mapped"
    if message.is_thought:
        return "thought"
    return "prefilled" if message.chosen is None else "decoded"


def _created(path: Path) -> int:
    """Create a file that only the user can read, and return its descriptor, open for writing.

    Raises:
        InvalidRequestError: It exists already: nothing is overwritten, and no link is followed.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except FileExistsError:
        raise InvalidRequestError(f"{str(path)!r} exists already: delete it, or record to another file") from None
