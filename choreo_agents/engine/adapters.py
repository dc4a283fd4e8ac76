"""Registry of the LoRA adapters and cache mappers that an engine has loaded, by the names that calls use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from choreo_agents.errors import AdapterError
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from choreo_agents.models.lora import LoraAdapter
from choreo_agents.synthesis.mapper import MAPPER_FILE, CacheMapper, load_mapper, reads_boundaries

BASE = "base"
"""Name of the base model, for calls of an engine that has a default adapter."""


@dataclass(frozen=True)
class Loaded:
    """Contents of a folder: an adapter, a cache mapper, or both."""

    folder: Path
    lora: LoraAdapter | None
    mapper: CacheMapper | None
    mapper_key: str = ""
    """Fingerprint of the mapper."""
    boundaries: bool = False
    """Whether it reads boundaries of branches (see `synthesis.mapper`)."""

    @property
    def lora_key(self) -> str:
        """Fingerprint of the adapter; empty if there is none."""
        return "" if self.lora is None else self.lora.fingerprint

    @property
    def key(self) -> str:
        """Fingerprint of adapter, mapper and boundaries together."""
        return f"{self.lora_key}+{self.mapper_key}{'+boundaries' if self.boundaries else ''}"


class AdapterRegistry:
    """Adapters of one engine, by tenant and name. Used under the engine's lock only.

    A tenant's names are its own: no other can use or see them. Weights are kept once for all.

    Args:
        model: Model that they adapt.
    """

    def __init__(self, model: ModelAdapter) -> None:
        self._model = model
        self._by_tenant: dict[str, dict[str, Loaded]] = {}
        """Adapters by tenant, and by the names that its calls use."""
        self.default: tuple[str, Loaded] | None = None
        """Name and contents of the engine's default adapter, which all tenants have."""
        self.loras: dict[str, LoraAdapter] = {}
        """Weights of the adapters that any tenant has, by fingerprint."""
        self.mappers: dict[str, CacheMapper] = {}

    @property
    def default_key(self) -> str:
        """`Loaded.key` of the default adapter; empty if there is none."""
        return "" if self.default is None else self.default[1].key

    def add_default(self, loaded: Loaded) -> None:
        """Make a folder's contents the default of all tenants, under the folder's name.

        Raises:
            AdapterError: The folder has no name that calls could use.
        """
        self.default = (_usable_name(loaded, None), loaded)
        self._add_weights(loaded)

    def add(self, loaded: Loaded, name: str | None, tenant: str) -> str:
        """Register a folder's contents for a tenant, by default under the folder's name. Raises what `require_free`
        does."""
        name = self.require_free(loaded, name, tenant)
        self._add_weights(loaded)
        self._by_tenant.setdefault(tenant, {})[name] = loaded
        return name

    def require_free(self, loaded: Loaded, name: str | None, tenant: str) -> str:
        """Return the name that `add` would give it.

        Raises:
            AdapterError: The name is taken, or could name nothing.
        """
        name = _usable_name(loaded, name)
        current = self._named_by(tenant).get(name)
        if current is not None and current.key != loaded.key:
            own = name in self._by_tenant.get(tenant, {})
            owner = f"that of {str(current.folder)!r}" if own else "the engine's default"
            raise AdapterError(f"the adapter name {name!r} is taken by {owner}: pass another name")
        return name

    def folders(self, tenant: str) -> dict[str, str]:
        """Return the folders of all adapters that a tenant's calls can name, by name."""
        return {name: str(loaded.folder) for name, loaded in self._named_by(tenant).items()}

    def drop_tenant(self, tenant: str) -> None:
        """Forget a tenant's names, and the weights that no other tenant has a name for."""
        self._by_tenant.pop(tenant, None)
        named = [loaded for own in self._by_tenant.values() for loaded in own.values()]
        named += [self.default[1]] if self.default else []
        for key in self.loras.keys() - {loaded.lora_key for loaded in named}:
            del self.loras[key]
        for key in self.mappers.keys() - {loaded.mapper_key for loaded in named}:
            del self.mappers[key]

    def name_of(self, lora_key: str, tenant: str) -> str | None:
        """Return the first name that a tenant has for an adapter; None for the base model."""
        by_name = self._named_by(tenant).items()
        return next((name for name, loaded in by_name if lora_key and loaded.lora_key == lora_key), None)

    def _named_by(self, tenant: str) -> dict[str, Loaded]:
        return dict([self.default] if self.default else []) | self._by_tenant.get(tenant, {})

    def _add_weights(self, loaded: Loaded) -> None:
        if loaded.lora is not None:
            self.loras[loaded.lora_key] = loaded.lora
        if loaded.mapper is not None:
            self.mappers[loaded.mapper_key] = loaded.mapper

    def find(self, name: str | None, tenant: str) -> Loaded:
        """Return the adapter that a call names, or the default; with empty keys for the base model.

        Raises:
            AdapterError: The tenant has none of that name.
        """
        if name is None and self.default:
            return self.default[1]
        if name is None or name == BASE:
            return Loaded(Path(), None, None)
        by_name = self._named_by(tenant)
        if name not in by_name:
            names = ", ".join(map(repr, by_name)) or "none"
            raise AdapterError(f"adapter {name!r} is not loaded: load it with load_adapter(); loaded: {names}")
        return by_name[name]


def _usable_name(loaded: Loaded, name: str | None) -> str:
    """Return the name that an adapter is loaded by, by default its folder's; raise `AdapterError` if it can be none."""
    if name is None:
        name = os.path.basename(os.path.abspath(loaded.folder))  # noqa: PTH100, PTH119 - a link keeps its name
    if name in ("", BASE):
        raise AdapterError(
            f"the adapter name {name!r} is reserved, in {str(loaded.folder)!r}: rename the folder, or use "
            "load_adapter(folder, name)"
        )
    return name


def read_loaded(model: ModelAdapter, folder: str | Path) -> Loaded:
    """Read the adapter and the mapper of a folder; one of them may be missing.

    Args:
        model: Model that they are for.
        folder: Folder to read.

    Raises:
        AdapterError: There is neither, a file is damaged, or it is another model's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise AdapterError(f"there is no folder {str(folder)!r}: pass one that a training run or peft wrote")
    lora, mapper, mapper_key = None, None, ""
    if (folder / MAPPER_FILE).is_file():
        mapper = load_mapper(folder, model.geometry, model.kinds, model.weights).to(model.device)
        mapper_key = mapper.fingerprint
    if mapper is None or (folder / CONFIG_FILE).is_file() or (folder / WEIGHTS_FILE).is_file():
        lora = model.read_adapter(folder)
    return Loaded(folder, lora, mapper, mapper_key, reads_boundaries(folder))
