"""The adapters and cache mappers that an engine has loaded, by the names that calls use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from choreo_agents.errors import AdapterError
from choreo_agents.kv.tiers import Stored
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.adapter_files import CONFIG_FILE
from choreo_agents.models.lora import LoraAdapter
from choreo_agents.synthesis.mapper import MAPPER_FILE, CacheMapper, load_mapper

BASE = "base"
"""Names the model alone, where an engine's own calls have an adapter."""


@dataclass(frozen=True)
class Loaded:
    """What a folder held: an adapter, a mapper, or both."""

    folder: Path
    lora: LoraAdapter | None
    mapper: CacheMapper | None
    mapper_key: str = ""
    """The mapper's fingerprint; of one that rounds, with `.int8` after it."""

    @property
    def lora_key(self) -> str:
        """The adapter's fingerprint; empty if there is none."""
        return "" if self.lora is None else self.lora.fingerprint


class AdapterRegistry:
    """Of one engine. Used under its lock only.

    Args:
        model: That they adapt.
    """

    def __init__(self, model: ModelAdapter) -> None:
        self._model = model
        self._by_name: dict[str, Loaded] = {}
        self._default: str | None = None
        self._loras: dict[str, LoraAdapter] = {}
        self._mappers: dict[str, CacheMapper] = {}

    @property
    def loras(self) -> Mapping[str, LoraAdapter]:
        """By fingerprint; grows."""
        return self._loras

    @property
    def mappers(self) -> Mapping[str, CacheMapper]:
        """By fingerprint; grows."""
        return self._mappers

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def add(self, loaded: Loaded, name: str | None, *, default: bool = False) -> str:
        """Give what `read` has read a name, by default its folder's.

        Raises:
            AdapterError: The name is that of another.
        """
        name = loaded.folder.name if name is None else name
        if not name or name == BASE:
            raise AdapterError(f"an adapter cannot be called {name!r}: give it another name")
        known = self._by_name.get(name)
        if known is not None and (known.lora_key, known.mapper_key) != (loaded.lora_key, loaded.mapper_key):
            raise AdapterError(
                f"another adapter is called {name!r}, that of {str(known.folder)!r}: name this otherwise"
            )
        self._by_name[name] = loaded
        if loaded.lora is not None:
            self._loras[loaded.lora_key] = loaded.lora
        if loaded.mapper is not None:
            self._mappers[loaded.mapper_key] = loaded.mapper
        if default:
            self._default = name
        return name

    def lora_key(self, name: str | None) -> str:
        """The fingerprint of the adapter that a call names, or that calls have by default; empty for the model alone.

        Raises:
            AdapterError: There is none of that name.
        """
        loaded = self._find(name)
        return "" if loaded is None else loaded.lora_key

    def mapper_key(self, name: str | None) -> str:
        """The same of its mapper; empty if it has none."""
        loaded = self._find(name)
        return "" if loaded is None else loaded.mapper_key

    def name_of(self, lora_key: str) -> str | None:
        """What an adapter was called first; None for the model alone."""
        return next((name for name, loaded in self._by_name.items() if lora_key and loaded.lora_key == lora_key), None)

    def _find(self, name: str | None) -> Loaded | None:
        name = self._default if name is None else name
        if name is None or name == BASE:
            return None
        if name not in self._by_name:
            there = ", ".join(map(repr, self._by_name)) or "none"
            raise AdapterError(f"there is no adapter {name!r}: load it with load_adapter; loaded are {there}")
        return self._by_name[name]


def read_loaded(model: ModelAdapter, folder: str | Path, stored: Stored = "full") -> Loaded:
    """Read the adapter and the mapper of a folder, as far as there are any.

    Args:
        model: That they are for.
        folder: Which.
        stored: How mapped copies are stored: with `int8` the mapper makes none but such as can be.

    Raises:
        AdapterError: There is neither, a file is damaged, or it is another model's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise AdapterError(f"there is no folder {str(folder)!r}: give one that a training run or peft has written")
    found = Loaded(folder, None, None)
    if (folder / MAPPER_FILE).is_file():
        mapper = load_mapper(folder, model.geometry, model.kinds, model.weights)
        mapper.rounds = stored == "int8"
        key = mapper.fingerprint + (".int8" if mapper.rounds else "")
        found = replace(found, mapper=mapper.to(model.device), mapper_key=key)
    if found.mapper is None or (folder / CONFIG_FILE).is_file():
        found = replace(found, lora=model.read_adapter(folder))
    return found
