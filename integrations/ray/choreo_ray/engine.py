"""An engine whose calls run in actors of Ray's."""

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
from choreo_ray.naming import ended, named, require_name
from choreo_ray.placing import Placing, Strategy, absolute, with_folders
from choreo_ray.remote import RemoteExecution, RouterOptions, remote_engine

NAMESPACE = "choreo"
START_S = 60.0


class RayEngine(Engine):
    """An engine over a cluster of Ray's: it knows all messages, and actors compute."""

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
        """Start an actor for each engine, and an engine over them.

        If that fails, the actors end that were started for it; those of a name that were there before go on.

        Args:
            model: A folder, a hub name or `"embedded"`, which every machine of the cluster has to find.
            engines: How many. `num_cpus`, `num_gpus`: that Ray sets aside for each. `threads`: that torch computes with
                in each, on a CPU.
            placement: `"PACK"`, `"SPREAD"`, `"STRICT_PACK"` or `"STRICT_SPREAD"`: they lie so in a placement group of
                their own; or a placement group that has a bundle for each. None: wherever Ray finds room.
            address: Of the cluster, `HOST:PORT` or `"auto"`; None: what `RAY_ADDRESS` says, else one is started on this
                machine, which ends with the last engine here. What `ray.init` has reached before is used.
            object_store_bytes: Of a cluster that is started; by default Ray's share of the memory. KV goes through it.
            name: The actors outlive this process, and whoever loads an engine by that name has it over the same ones;
                `end` ends them. On a cluster that is started here they end with it, once they have written what is to
                be kept. None: they end with this engine. `namespace`: Ray's, of these names.
            start_s: Seconds in which the actors have to find room, and begin; loading the model takes what it takes.
            device: These and what follows them up to `backend` are those of each engine: see `Engine.load`.
            salt: Of the router.
            router: See `RouterOptions`. `adapter` and `chat` are those of each engine, too; `copied_bytes` is
                less by default where the object store is small, half of an engine's share of it.

        Raises:
            ClusterError: There is no such cluster, or it has no room for them within `start_s`.
            EngineMismatchError: Actors of that name serve another model, or a machine has another version of ours.
            EngineLostError: An actor has died meanwhile.
            InvalidRequestError: An argument is out of range. What `Engine.load` raises, as it was raised in an actor.
        """
        if isinstance(model, LoadedModel):
            raise InvalidRequestError("each actor loads its own model: give a folder or a name, not a loaded model")
        placing = Placing(engines, num_cpus, num_gpus, placement, name, namespace, start_s)
        said: dict[str, Any] = {"device": device, "dtype": dtype, "prepacked": prepacked, "backend": backend}
        said |= {"generation_config": generation_config, "scheduling": scheduling, "memory": with_folders(memory)}
        said |= {"chat": router.get("chat"), "adapter": absolute(router.get("adapter"))}
        options = {each: value for each, value in said.items() if value is not None}
        served = model if model == "embedded" else absolute(model)
        loading = Loading(str(served), threads, options)
        actors = Actors(Cluster(address, object_store_bytes), placing, loading)
        try:
            if router.get("copied_bytes") is None:
                router["copied_bytes"] = actors.copied_bytes()
            made = remote_engine(actors.far, model, salt=salt, made=cls, **router)
        except BaseException:
            actors.undo()
            raise
        made._actors = actors
        return made

    @staticmethod
    def end(name: str, *, namespace: str = NAMESPACE, address: str | None = None) -> int:
        """End the actors of a name for good, whoever uses them, once they have written what is to be kept.

        Args:
            name: What `load` was given, as `namespace` and `address` were.

        Returns:
            How many there were.

        Raises:
            ClusterError: There is no such cluster: none is started just to look for them.
        """
        require_name(name, namespace)
        cluster = Cluster(address, None, starts=False)
        try:
            return ended(named(name, namespace))
        finally:
            cluster.close()

    def drain(self, name: str) -> int:
        """Before an engine's machine is taken away: place nothing new there, and hand over what it alone has.

        Calls under way there go on. When its actor has ended and begun again, it is as any other.

        Args:
            name: The engine's, as `engine_stats` has it.

        Returns:
            How many messages others have now; the rest is encoded again where it is read.

        Raises:
            InvalidRequestError: There is no such engine now, or no other that stays. EngineClosedError: This one is
                closed.
        """
        if self._actors is None:
            raise EngineClosedError("the engine is closed, and has nothing to hand over: load a new one")
        execution = self._core.execution
        assert isinstance(execution, RemoteExecution)
        return execution.drain(name)

    def engine_stats(self) -> Mapping[str, EngineStats]:
        """What each engine holds and has done, for all routers together, by its name; of those that are there."""
        if self._actors is None:
            raise EngineClosedError(
                "the engine is closed, and has ended its actors, or left them to others: load a new one"
            )
        return self._actors.stats()

    def close(self) -> None:
        """See `Engine`. The engine that `load` returned ends its actors, unless they have a name."""
        super().close()
        actors, self._actors = self._actors, None
        if actors is not None:
            actors.close()
