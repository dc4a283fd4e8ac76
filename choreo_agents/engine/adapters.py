"""The adapters and cache mappers that an engine has loaded, by the names that calls use."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from choreo_agents.errors import AdapterError
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from choreo_agents.models.lora import LoraAdapter
from choreo_agents.synthesis.mapper import MAPPER_FILE, CacheMapper, load_mapper, read_merging

BASE = "base"
"""Names the model alone, where an engine's own calls have an adapter."""


@dataclass(frozen=True)
class Loaded:
    """What a folder held: an adapter, a mapper, or both."""

    folder: Path
    lora: LoraAdapter | None
    mapper: CacheMapper | None
    mapper_key: str = ""
    """The mapper's fingerprint."""
    boundaries: bool = False
    """Whether it reads boundaries of branches (see `synthesis.mapper`)."""

    @property
    def name(self) -> str:
        """The folder's own, also of one that was given as `.`."""
        return os.path.basename(os.path.abspath(self.folder))  # noqa: PTH100, PTH119 - a link keeps its name

    @property
    def lora_key(self) -> str:
        """The adapter's fingerprint; empty if there is none."""
        return "" if self.lora is None else self.lora.fingerprint

    @property
    def key(self) -> str:
        """Names all that it does."""
        return f"{self.lora_key}+{self.mapper_key}{'+boundaries' if self.boundaries else ''}"


class AdapterRegistry:
    """Of one engine. Used under its lock only.

    Names are a tenant's own: no other can use them, or learn of them. Weights are kept once for all.

    Args:
        model: That they adapt.
    """

    def __init__(self, model: ModelAdapter) -> None:
        self._model = model
        self._by_tenant: dict[str, dict[str, Loaded]] = {}
        """By the names that its calls use."""
        self.default: tuple[str, Loaded] | None = None
        """The engine's, which all tenants have, and its name."""
        self.loras: dict[str, LoraAdapter] = {}
        """Weights of the adapters that any tenant has, by fingerprint."""
        self.mappers: dict[str, CacheMapper] = {}

    @property
    def default_key(self) -> str:
        """See `Loaded.key`: of the engine's own; empty if it has none."""
        return "" if self.default is None else self.default[1].key

    def add_default(self, loaded: Loaded) -> None:
        """What `read` has read is all tenants', under its folder's name, and what calls have that name no other.

        Raises:
            AdapterError: The folder has no name that calls could use.
        """
        name = loaded.name
        if name in ("", BASE):
            raise AdapterError(
                f"the adapter in {str(loaded.folder)!r} would be called {name!r}, which names none: rename the folder, "
                "or load it with load_adapter(folder, name)"
            )
        self._keep(loaded)
        self.default = (name, loaded)

    def add(self, loaded: Loaded, name: str | None, tenant: str) -> str:
        """Give what `read` has read a name of a tenant's, by default its folder's. Raises what `require_free` does."""
        name = self.require_free(loaded, name, tenant)
        self._keep(loaded)
        self._by_tenant.setdefault(tenant, {})[name] = loaded
        return name

    def require_free(self, loaded: Loaded, name: str | None, tenant: str) -> str:
        """The name that `add` would give it.

        Raises:
            AdapterError: The name is that of another.
        """
        name = loaded.name if name is None else name
        if name in ("", BASE):
            raise AdapterError(
                f"an adapter cannot be called {name!r}: give it another name, load_adapter(folder, name)"
            )
        known = self._of(tenant).get(name)
        if known is not None and known.key != loaded.key:
            own = name in self._by_tenant.get(tenant, {})
            whose = f"that of {str(known.folder)!r}" if own else "the engine's own"
            raise AdapterError(f"another adapter is called {name!r}, {whose}: name this otherwise")
        return name

    def folders(self, tenant: str) -> dict[str, str]:
        """Where what a tenant's calls can name comes from, by name."""
        return {name: str(loaded.folder) for name, loaded in self._of(tenant).items()}

    def drop_tenant(self, tenant: str) -> None:
        """Forget a tenant's names, and the weights that no other has a name for."""
        self._by_tenant.pop(tenant, None)
        named = [loaded for own in self._by_tenant.values() for loaded in own.values()]
        named += [self.default[1]] if self.default else []
        for key in self.loras.keys() - {each.lora_key for each in named}:
            del self.loras[key]
        for key in self.mappers.keys() - {each.mapper_key for each in named}:
            del self.mappers[key]

    def name_of(self, lora_key: str, tenant: str) -> str | None:
        """What a tenant calls an adapter first; None for the model alone."""
        known = self._of(tenant).items()
        return next((name for name, loaded in known if lora_key and loaded.lora_key == lora_key), None)

    def _of(self, tenant: str) -> dict[str, Loaded]:
        return dict([self.default] if self.default else []) | self._by_tenant.get(tenant, {})

    def _keep(self, loaded: Loaded) -> None:
        if loaded.lora is not None:
            self.loras[loaded.lora_key] = loaded.lora
        if loaded.mapper is not None:
            self.mappers[loaded.mapper_key] = loaded.mapper

    def find(self, name: str | None, tenant: str) -> Loaded:
        """What a call names, or what calls have by default; with empty keys where that is the model alone.

        Raises:
            AdapterError: The tenant has none of that name.
        """
        if name is None and self.default:
            return self.default[1]
        if name is None or name == BASE:
            return Loaded(Path(), None, None)
        known = self._of(tenant)
        if name not in known:
            there = ", ".join(map(repr, known)) or "none"
            raise AdapterError(f"there is no adapter {name!r}: load it with load_adapter; loaded are {there}")
        return known[name]


def read_loaded(model: ModelAdapter, folder: str | Path) -> Loaded:
    """Read the adapter and the mapper of a folder, as far as there are any.

    Args:
        model: That they are for.
        folder: Which.

    Raises:
        AdapterError: There is neither, a file is damaged, or it is another model's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise AdapterError(f"there is no folder {str(folder)!r}: give one that a training run or peft has written")
    found = Loaded(folder, None, None)
    if (folder / MAPPER_FILE).is_file():
        mapper = load_mapper(folder, model.geometry, model.kinds, model.weights)
        found = replace(found, mapper=mapper.to(model.device), mapper_key=mapper.fingerprint)
    if found.mapper is None or (folder / CONFIG_FILE).is_file() or (folder / WEIGHTS_FILE).is_file():
        found = replace(found, lora=model.read_adapter(folder))
    return replace(found, boundaries=read_merging(folder).boundaries)
