"""`RayEngine`: an engine whose calls run in Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from ray.util.placement_group import PlacementGroup

from choreo_agents import Engine, EngineStats, Memory, Scheduling
from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import EngineClosedError, InvalidRequestError
from choreo_agents.models import GenerationConfigUse, LoadedModel
from choreo_ray.actor import Loading
from choreo_ray.cluster import Cluster
from choreo_ray.fleet import Actors
from choreo_ray.naming import actors_named, end_actors, require_name
from choreo_ray.placing import Placing, Strategy, absolute, with_absolute
from choreo_ray.remote import RemoteExecution, RouterOptions, remote_engine

NAMESPACE = "choreo"
START_S = 60.0


class RayEngine(Engine):
    """An engine over a Ray cluster: it knows all messages, and actors compute."""

    _actors: Actors | None = None

    @classmethod
    @refuses_unknown(RouterOptions)
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
        dtype: torch.dtype | str | None = None,
        prepacked: bool | None = None,
        generation_config: GenerationConfigUse | None = None,
        memory: Memory | None = None,
        scheduling: Scheduling | None = None,
        backend: str | None = None,
        salt: str = "",
        **router: Unpack[RouterOptions],
    ) -> RayEngine:
        """Start an actor for each engine, and return an engine that runs its calls in them.

        If that fails, the actors that were started for it end; named ones that existed before go on.

        Args:
            model: A directory, a hub name or `"embedded"`, which every machine of the cluster has to find.
            engines: Number of engines. `num_cpus`, `num_gpus`: what Ray reserves for each. `threads`: what torch uses
                in each, on a CPU.
            placement: `"PACK"`, `"SPREAD"`, `"STRICT_PACK"` or `"STRICT_SPREAD"`, the strategy of a new placement
                group; or a placement group that has a bundle for each. None: wherever Ray has the resources.
            address: Address of the cluster, `HOST:PORT` or `"auto"`; None: `RAY_ADDRESS`, else a cluster is started on
                this machine, and ends with the last engine here. A cluster that `ray.init` has reached before is used.
            object_store_bytes: Size of the object store of a cluster that is started; None: Ray's share. KV goes
                through it.
            name: Name of the actors, which then outlive this process: an engine that is loaded by that name uses the
                same ones, and `end` ends them. On a cluster that is started here they end with it, once they have
                written what is to persist. None: they end with this engine. `namespace`: Ray's, of these names.
            start_s: Seconds within which the actors have to be scheduled and begin; loading the model is not limited.
            device: This and all up to `backend` are arguments of each engine: see `Engine.load`.
            salt: Salt of the router.
            router: See `RouterOptions`. `adapter` and `chat` apply to each engine, too. The default of `copied_bytes`
                is less where the object store is small: half of an engine's share of it.

        Raises:
            ClusterError: There is no such cluster, or it has no resources for the actors within `start_s`.
            EngineMismatchError: Actors of that name serve another model, or a machine has another version of this
                package.
            EngineLostError: An actor has died meanwhile.
            InvalidRequestError: An argument is out of range. Errors of `Engine.load` are raised as in an actor.
        """
        if isinstance(model, LoadedModel):
            raise InvalidRequestError("each actor loads its own model: pass a folder or a name, not a loaded model")
        placing = Placing(engines, num_cpus, num_gpus, placement, name, namespace, start_s)
        config: dict[str, Any] = {"device": device, "dtype": dtype, "prepacked": prepacked, "backend": backend}
        config |= {"generation_config": generation_config, "scheduling": scheduling, "memory": with_absolute(memory)}
        config |= {"chat": router.get("chat"), "adapter": absolute(router.get("adapter"))}
        options = {key: value for key, value in config.items() if value is not None}
        served = model if model == "embedded" else absolute(model)
        loading = Loading(str(served), threads, options)
        actors = Actors(Cluster(address, object_store_bytes), placing, loading)
        try:
            if router.get("copied_bytes") is None:
                router["copied_bytes"] = actors.copied_bytes()
            engine = remote_engine(actors.clients, model, salt=salt, made=cls, **router)
        except BaseException:
            actors.undo()
            raise
        engine._actors = actors
        return engine

    @staticmethod
    def end(name: str, *, namespace: str = NAMESPACE, address: str | None = None) -> int:
        """End the actors of a name for good, whoever uses them, once they have written what is to persist.

        Args:
            name: Name that `load` was given, as `namespace` and `address` were.

        Returns:
            Number of actors that there were.

        Raises:
            ClusterError: There is no such cluster: none is started just to look for the actors.
        """
        require_name(name, namespace)
        cluster = Cluster(address, None, starts=False)
        try:
            return end_actors(actors_named(name, namespace))
        finally:
            cluster.close()

    def drain(self, name: str) -> int:
        """Place nothing new on an engine whose machine is to be taken away, and copy to others what only it has.

        Calls under way there go on. When its actor has ended and restarted, it is as any other.

        Args:
            name: Name of the engine, as in `engine_stats`.

        Returns:
            Number of messages that others have now; the rest is encoded again where it is read.

        Raises:
            InvalidRequestError: There is no such engine now, or no other that stays. EngineClosedError: This one is
                closed.
        """
        if self._actors is None:
            raise EngineClosedError("the engine is closed, and has no replicas: load a new one")
        assert self.admin is not None
        execution = self.admin.core.execution
        assert isinstance(execution, RemoteExecution)
        return execution.drain(name)

    def engine_stats(self) -> Mapping[str, EngineStats]:
        """Return the statistics of each engine that is up, for all routers together, by its name."""
        if self._actors is None:
            raise EngineClosedError("the engine is closed, and has ended or left its actors: load a new one")
        return self._actors.stats()

    def close(self) -> None:
        """Close the engine (see `Engine`). The engine that `load` returned ends its actors, unless they have a name."""
        super().close()
        actors, self._actors = self._actors, None
        if actors is not None:
            actors.close()
