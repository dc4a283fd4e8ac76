"""Records what an engine does for the runs of graphs in a block: `engine.record`.

What was asked and said is known by digests: nobody who lacks their key can find out by guessing what they are of.
"""

from __future__ import annotations

import hmac
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""What a header's proof is of."""
_WEIGHED_EVERY_S = 0.02
"""How often it is written down how much KV lies where, at most."""
_SHORT = 16
"""Characters of a digest that names a message, or a part of a request."""


class Digests:
    """Under the key of one recording: the same for the same things in every run of a program that has the key.

    Args:
        key: The recording's.
        find: The message of a handle.
    """

    def __init__(self, key: bytes, find: Callable[[MessageHandle], Message]) -> None:
        self.key = key
        self._find = find
        self._messages: WeakKeyDictionary[Message, str] = WeakKeyDictionary()

    def of(self, what: str, content: Any) -> str:
        """Of JSON-plain content; `what` says what it is."""
        return code(self.key, what, content)

    def request(
        self, handles: Sequence[MessageHandle], offsets: Sequence[int], end: int, asked: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return a digest of each part of a call: of its view, by what that was made of and where, and of what else it
        depends on."""
        seen = [self._message(self._find(handle)) for handle in handles]
        parts = {"view": [seen, [offset - end for offset in offsets]], **asked}
        return {name: self.of(name, part)[:_SHORT] for name, part in parts.items()}

    def name(self, message: Message) -> str:
        """Return the name by which a record knows a message."""
        return self._message(message)[:_SHORT]

    def _message(self, message: Message) -> str:
        """Of a message's words, and of all that its encoding has attended to."""
        for each in message.unknown(self._messages.__contains__):
            lineage, parents = each.lineage, [self._messages[parent] for parent in each.parents]
            encoder = f"{lineage.adapter}~{lineage.mapper}"
            self._messages[each] = message_id(self.key, encoder, each.tokens, parents, each.relative_offsets)
        return self._messages[message]


class Recorder:
    """Of one block: a file of its user's alone, to which another thread writes line by line.

    May be used from any thread, and by event loops. Each line is handed to the system in one piece: what a process that
    dies has written, it leaves behind.

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
        self._noted: set[str] = set()
        """The names of messages that have their lines."""
        self._noting, self._lock = threading.Lock(), threading.Lock()
        self._lines: SimpleQueue[Line | None] = SimpleQueue()
        self._is_closed = False
        self._failure: Exception | None = None
        nonce, salted = secrets.token_hex(16), tenant.message_ids.salted
        key = _salted_key(tenant.message_ids.seals, nonce) if salted else secrets.token_hex(32).encode()
        self.digests = digests(key)
        self.write(self._header(nonce, salted))
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

    def begin_run(self) -> int:
        """The number of the next run."""
        return next(self._runs)

    def at_s(self, counted_s: float | None = None) -> float:
        """Seconds since it began, now or as `time.perf_counter` has counted."""
        return max(0.0, (time.perf_counter() if counted_s is None else counted_s) - self._began_s)

    def write(self, line: Line) -> None:
        """Add a line to the file; after `close`, nothing: a run may outlive the block that it began in."""
        with self._lock:
            if not self._is_closed:
                self._lines.put(line)

    def call(
        self,
        records: Recordings,
        read: Sequence[MessageHandle],
        made: MessageHandle,
        thought: MessageHandle | None,
        sampled: Sequence[int],
        times: tuple[float, float | None],
        **told: Any,
    ) -> None:
        """Write down a call that was said now.

        Args:
            records: Of the engine that has made it.
            read: What it has read.
            made: What it has said.
            thought: What it has decoded to think that out.
            sampled: Its tokens.
            times: When it was asked, and when its first token was there, as `time.perf_counter` counts.
            told: What else its line says.
        """
        digests = records.digests(self.digests.key)
        messages = records.messages([*read, made, *(() if thought is None else (thought,))])
        names, spent, seen = self._names(digests, messages), messages[len(read)].usage, len(read)
        self.write(
            RecordedCall(
                read=sum(handle.length for handle in read),
                reads=tuple(names[:seen]),
                made=names[seen],
                thought=None if thought is None else names[-1],
                asked_s=self.at_s(times[0]),
                first_s=None if times[1] is None else self.at_s(times[1]),
                said_s=self.at_s(),
                said=digests.of("said", list(sampled)),
                encoded=spent.tokens_encoded,
                reused=spent.tokens_reused,
                recomputed=spent.tokens_recomputed,
                **told,
            )
        )
        self.memory()

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
        """End the file when all is written; raise that with which a line could not be: an `OSError` of a full disk."""
        with self._lock:
            self._is_closed = True
            self._lines.put(RecordingEnded())
            self._lines.put(None)
        self._thread.join()
        os.close(self._file)
        if self._failure is not None:
            raise self._failure

    def _names(self, digests: Digests, messages: Iterable[Message]) -> list[str]:
        """What messages are called; each, and what it was encoded from, has its line then."""
        name, names = digests.name, list[str]()
        with self._noting:
            for message in messages:
                for each in message.unknown(lambda other: name(other) in self._noted):
                    self._noted.add(name(each))
                    self.write(
                        RecordedMessage(
                            name=name(each),
                            tokens=len(each.tokens),
                            parents=tuple(map(name, each.parents)),
                            role=each.role,
                            author=each.author,
                            origin=_origin(each),
                            at=each.native_offset,
                            offsets=each.relative_offsets,
                            words_of=tuple(map(name, each.sources)),
                            confidential=each.confidential,
                        )
                    )
                names.append(name(message))
        return names

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                left = memoryview(line.model_dump_json().encode() + b"\n")
                while left and self._failure is None:
                    left = left[os.write(self._file, left) :]
            except Exception as failure:
                self._failure = failure  # half a line may stand there, and nothing may follow it


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
        core = self._tenant.core
        found = core.adapters.find(adapter, self._tenant.name)
        return [core.model.adapter.fingerprint, found.lora_key, found.mapper_key]

    def messages(self, handles: Iterable[MessageHandle]) -> list[Message]:
        """What handles are of."""
        return [self._tenant.find(handle) for handle in handles]


class _Ongoing:
    """What a tenant records now."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.digests: dict[bytes, Digests] = {}
        """By their keys: they remember what they have seen."""


def key_path(path: Path) -> Path:
    """Where the key of a recording lies whose tenant has no salt."""
    return path.with_name(f"{path.name}.key")


def key_of(recording: Recording, seals: Seals) -> bytes:
    """The key of a recording's digests.

    Args:
        recording: Which.
        seals: Of the tenant that has made it.

    Raises:
        ReplayError: It lies in a file that is not there.
        InvalidRequestError: The tenant has another salt, or the file another key.
    """
    header, path = recording.header, key_path(recording.path)
    if header.keyed == "salt":
        key, where = _salted_key(seals, header.nonce), "it was recorded under another salt: load the engine with that"
    elif path.is_file():
        key, where = path.read_bytes().strip(), f"{str(path)!r} is the key of another recording"
    else:
        raise ReplayError(
            f"there is no {path.name} beside the recording: without it nobody can tell which calls are as recorded"
        )
    if not hmac.compare_digest(code(key, _PROOF, header.nonce).encode(), header.proof.encode()):
        raise InvalidRequestError(f"the digests of {str(recording.path)!r} cannot be checked: {where}")
    return key


def _salted_key(seals: Seals, nonce: str) -> bytes:
    return seals.seal("recording", nonce).encode()


def _origin(message: Message) -> Origin:
    if message.lineage.mapper:
        return "mapped"
    if message.is_thought:
        return "thought"
    return "given" if message.chosen is None else "said"


def _created(path: Path) -> int:
    """A new file that its user alone may read, open for writing.

    Raises:
        InvalidRequestError: There is one already: nothing is overwritten, and no link is followed.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except FileExistsError:
        raise InvalidRequestError(f"{str(path)!r} is there already: delete it, or record to another file") from None
