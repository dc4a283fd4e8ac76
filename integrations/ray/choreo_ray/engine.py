"""An engine whose calls run in actors of Ray's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ray.util.placement_group import PlacementGroup

from choreo_agents import Engine, Memory, Quota, Scheduling
from choreo_agents.engine.elsewhere import COPIED_BYTES, PATIENCE_S, Costs
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import GenerationConfigUse, LoadedModel
from choreo_agents.tracing import EventSink, discard
from choreo_ray.actor import Loading
from choreo_ray.cluster import Cluster
from choreo_ray.fleet import Actors, Placing, Strategy

NAMESPACE = "choreo"
START_S = 60.0


class RayEngine(Engine):
    """An engine over a cluster of Ray's: it knows all messages, and actors compute."""

    _actors: Actors | None = None

    @classmethod
    def load(  # type: ignore[override]
        cls,
        model: str | Path = "embedded",
        *,
        engines: int = 2,
        num_cpus: float = 1,
        num_gpus: float = 0,
        threads: int = 1,
        placement: Strategy | PlacementGroup | None = None,
        address: str | None = None,
        object_store_bytes: int | None = None,
        name: str | None = None,
        namespace: str = NAMESPACE,
        start_s: float = START_S,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        prepacked: bool | None = None,
        generation_config: GenerationConfigUse | None = None,
        chat: Mapping[str, Any] | None = None,
        memory: Memory | None = None,
        scheduling: Scheduling | None = None,
        copied_bytes: int = COPIED_BYTES,
        patience_s: float = PATIENCE_S,
        costs: Costs | None = None,
        seed: int = 0,
        salt: str = "",
        quota: Quota | None = None,
        sink: EventSink = discard,
    ) -> RayEngine:
        """Start actors that load a model each, and an engine over them."""
        if isinstance(model, LoadedModel):
            raise InvalidRequestError("each actor loads its own model: give a folder or a name, not a loaded model")
        placing = Placing(engines, num_cpus, num_gpus, placement, name, namespace, start_s)
        said: dict[str, Any] = {"device": device, "dtype": dtype, "prepacked": prepacked, "chat": chat}
        said |= {"generation_config": generation_config}
        loading = {each: value for each, value in said.items() if value is not None}
        each_has = {"memory": memory, "scheduling": scheduling}
        options = loading | {each: value for each, value in each_has.items() if value is not None}
        cluster = Cluster(address, object_store_bytes)
        actors = Actors(cluster, placing, Loading(str(model), threads, options))
        try:
            front = cls.over(
                actors.far,
                actors.model(str(model), dtype),
                copied_bytes=copied_bytes,
                patience_s=patience_s,
                costs=costs,
                memory=memory,
                seed=seed,
                salt=salt,
                quota=quota,
                sink=sink,
            )
        except BaseException:
            actors.close()
            raise
        assert isinstance(front, RayEngine)
        front._actors = actors
        return front

    def close(self) -> None:
        """See `Engine`. The engine that `load` returned ends its actors, unless they have a name."""
        super().close()
        actors, self._actors = self._actors, None
        if actors is not None:
            actors.close()
