"""KV of one tenant in files that outlive the engine: written in the background, found again by what it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.keeping.wanted import WantedKV
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.naming import Naming
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.store import KVStore, KVWriter
from choreo_agents.kv.store.files import LastingPlace


class KeptKV:
    """May be used from any thread. Slow, but for `knows` and `keep`.

    Args:
        core: Has the KV, and reads it again.
        find: The message of a handle; raises a `HandleError` if it is not known and leased.
        store: Gets the files; None: the tenant has no salt, and so no file.
    """

    def __init__(self, core: EngineCore, find: Callable[[MessageHandle], Message], store: KVStore | None) -> None:
        self.store = store
        self._core = core
        self._find = find
        self._writer = None if store is None else KVWriter(store, core.unwritten_file)

    def knows(self, message_id: str) -> bool:
        """Whether a message has a file, as far as is known without looking."""
        return self.store is not None and self.store.knows(message_id)

    def has(self, message_id: str) -> bool:
        """Whether a message has a file, perhaps of another process: it is read from there if memory has lost it."""
        return self.store is not None and self.store.has(message_id)

    def keep(self, handles: Sequence[MessageHandle], *, lost_too: bool = False) -> None:
        """Have the KV of messages written that have no file yet; does not wait for it.

        Mapped copies are made of their sources again, and what is larger than the budget is left out. Until it is
        written memory does not lose it, within bounds.

        Args:
            handles: Of the messages.
            lost_too: Whether what has no KV is computed for that; else it is left out.

        Raises:
            HandleError: One is unknown or released.
            InvalidRequestError: The tenant has no salt, and there is something to be kept.
            EngineClosedError: The engine, or the tenancy, was closed.
        """
        core = self._core
        with core.lock:
            found = dict.fromkeys(self._find(handle) for handle in handles)
            new = [message for message in found if self._is_new(message, lost_too=lost_too)]
            if new and self._writer is None:
                raise InvalidRequestError(WITHOUT_SALT)
            wanted: list[WantedKV] = []
            with ExitStack() as undone:
                for message in new:
                    wanted.append(WantedKV(core, message))
                    undone.callback(wanted[-1].release)
                undone.pop_all()
        if self._writer is not None:
            self._writer.write(wanted)

    def discard(self, message_ids: Sequence[str]) -> None:
        """Have files removed, and those that are still to be written; does not wait for it, as `flush` does."""
        if self._writer is not None:
            self._writer.drop(message_ids)

    def require_gone(self, message_ids: Sequence[str]) -> None:
        """Raise `OSError` if a message has a file, good or not."""
        left = [message_id for message_id in message_ids if self.has(message_id)]
        if left:
            assert self.store is not None
            raise OSError(
                f"{len(left)} of {len(message_ids)} files in {str(self.store.folder)!r} cannot be removed, or were "
                f"kept again meanwhile, such as {left[0]!r}: see to the folder, and discard them again"
            )

    def wait(self) -> None:
        """Return when all that was asked before was tried: `flush` tells what failed."""
        if self._writer is not None:
            if self._core.loop.is_here:
                raise InvalidRequestError(
                    "files are waited for on the engine's own thread, which may have to read them"
                )
            self._writer.wait()

    def flush(self) -> None:
        """Return when all that was asked before is written.

        Raises:
            OSError: Something could not be. ChoreoError: It was lost before, and could not be computed again.
        """
        self.wait()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is to be written, if this is not the engine's thread, and be asked nothing more."""
        if self._writer is not None:
            self._writer.close(wait=not self._core.loop.is_here)

    def _is_new(self, message: Message, *, lost_too: bool) -> bool:
        entry, cache = message.entry, self._core.cache
        lost = entry is None or cache.lost(entry) or not (cache.in_memory(entry) or entry.on_disk)
        if message.lineage.mapper or self.knows(message.handle.id) or (lost and not lost_too):
            return False
        nbytes = len(message.tokens) * self._core.model.adapter.geometry.bytes_per_token
        return self.store is None or nbytes <= self.store.budget_bytes


WITHOUT_SALT = (
    "KV that outlives its engine is sealed with a key made of the tenant's salt, and this one has none: "
    "load the engine with salt=..., a secret of yours, the same in every process that is to read the files"
)


def lasting_store(
    core: EngineCore, naming: Naming, folder: Path, budget_bytes: int, skipped: Callable[[Path, str], None]
) -> tuple[KVStore, LastingPlace]:
    """A tenant's store of this model in a folder that outlives the engine, and its place, perhaps still to be made."""
    with core.lock:
        encoder = naming.encoder(core.adapters.lora_key(None, naming.tenant))
    place = LastingPlace(folder, encoder, naming.tenant)
    return KVStore(place, core.model.adapter.geometry, naming.seal, budget_bytes, skipped), place


def kept_of(core: EngineCore, naming: Naming, find: Callable[[MessageHandle], Message]) -> KeptKV | None:
    """What keeps a tenant's KV where the engine was told to; None: it was told nothing, or keeps none.

    Raises:
        InvalidRequestError: The folder is another user's.
    """
    memory = core.settings.memory
    if memory.kept is None or not core.keeps_kv:
        return None
    if not naming.salted:
        return KeptKV(core, find, None)
    store, place = lasting_store(core, naming, memory.kept, memory.kept_bytes, core.skipped_file)
    with suppress(OSError):  # told when something is to be kept
        place.make()
    return KeptKV(core, find, store)
