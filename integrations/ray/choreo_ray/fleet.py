"""The actors of one router, one for each engine: schedules, starts, loads and ends them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import ray
import torch
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from choreo_agents import EngineStats
from choreo_agents.errors import EngineMismatchError, InvalidRequestError
from choreo_ray.actor import EngineActor, Loading
from choreo_ray.client import RayEngineClient
from choreo_ray.cluster import Cluster, object_store_bytes, resources
from choreo_ray.errors import ClusterError, translate
from choreo_ray.naming import actors_named, end_actors, get_or_start
from choreo_ray.placing import Placing
from choreo_ray.remote import COPIED_BYTES
from choreo_ray.remote.protocol import own_version

_CALLS = 1 << 14
"""Concurrent calls of an actor. Excess calls wait in its engine, and do not block methods that control other calls."""
_AGAIN_S = 0.1


class Actors:
    """The actors of one router, one for each engine.

    Args:
        cluster: Cluster that they run on.
        placing: Resources and placement that they ask for.
        loading: Arguments with which each of them loads its engine.

    Raises:
        ClusterError: It has no resources for them. What `Engine.load` raises in the first of them that fails.
    """

    def __init__(self, cluster: Cluster, placing: Placing, loading: Loading) -> None:
        self._cluster, self._placing = cluster, placing
        self._group: PlacementGroup | None = None
        self.clients: list[RayEngineClient] = []
        self._started: list[Any] = []
        """Actors that were started here."""
        try:
            self._require_possible()
            until = time.monotonic() + placing.start_s
            bundles = self._bundles(until)
            for number, name in enumerate(placing.names()):
                bundle = None if bundles is None else (bundles, number)
                self.clients.append(RayEngineClient(name, self._actor(name, loading, bundle)))
            self._meet(until, loading)
            self._load()
            self._meet(time.monotonic() + placing.start_s, loading)  # now each knows its model's dtype
        except BaseException as error:
            self.undo()
            if isinstance(error, RayError):
                raise ClusterError(f"the cluster failed while engines were loaded: {error}") from error
            raise
        if placing.name is not None:
            cluster.before_end(f"{placing.namespace}/{placing.name}", self._end_named)

    def copied_bytes(self) -> int:
        """Return the bytes of KV that may be on their way to one engine, so that all together never spill the object
        store.
        """
        return min(COPIED_BYTES, round(object_store_bytes() / (2 * self._placing.engines)))

    def stats(self) -> dict[str, EngineStats]:
        """Return the statistics of each engine that is up, by its name."""
        references = {client.name: client.actor.stats.remote() for client in self.clients}
        stats: dict[str, EngineStats] = {}
        for name, reference in references.items():
            with suppress(RayError):
                stats[name] = ray.get(reference)
        return stats

    def undo(self) -> None:
        """End the actors that were started here; nothing of them is kept."""
        if ray.is_initialized():
            for actor in self._started:
                ray.kill(actor, no_restart=True)
            self._remove_group()
        self._cluster.close()

    def close(self) -> None:
        """End the actors, unless they have a name; then only the end of the cluster ends them."""
        if self._placing.name is None and ray.is_initialized():
            end_actors([client.actor for client in self.clients])
            self._remove_group()
        self._cluster.close()

    def _end_named(self) -> None:
        assert self._placing.name is not None, "others go with who has made them"
        end_actors(actors_named(self._placing.name, self._placing.namespace))

    def _remove_group(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)

    def _require_possible(self) -> None:
        """Raise `ClusterError` if a cluster that was started here can never hold the actors: it does not grow."""
        if self._cluster.started and any(
            self._placing.engines * value > resources()[0].get(name, 0.0)
            for name, value in self._placing.bundle.items()
        ):
            raise self._no_room("it runs on this machine only, and does not scale")

    def _bundles(self, until: float) -> PlacementGroup | None:
        placing = self._placing
        if isinstance(placing.placement, PlacementGroup):
            if (bundles := len(placing.placement.bundle_specs)) < placing.engines:
                raise InvalidRequestError(
                    f"the placement group has {bundles} bundles, but {placing.engines} engines need one each"
                )
            return placing.placement
        if placing.placement is None:
            return None
        bundle = placing.bundle or {"CPU": 0.001}  # Ray refuses an empty bundle
        try:
            self._group = placement_group([bundle] * placing.engines, strategy=placing.placement)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"Ray rejected the placement group of bundles {bundle!r}: {error}") from error
        if not self._group.wait(max(0.0, until - time.monotonic())):
            raise self._no_room(f"the placement group {placing.placement!r} was not placed in {placing.start_s:g} s")
        return self._group

    def _actor(self, name: str, loading: Loading, bundle: tuple[PlacementGroup, int] | None) -> Any:
        placing = self._placing
        options: dict[str, Any] = {
            "num_cpus": placing.num_cpus,
            "num_gpus": placing.num_gpus,
            "max_concurrency": _CALLS,
            "max_restarts": -1,
            "max_task_retries": 0,
        }
        if bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(*bundle)
        lasting = None if placing.name is None else name
        actor, is_new = get_or_start(EngineActor, options, lasting, placing.namespace, name, loading)
        if is_new:
            self._started.append(actor)
        return actor

    def _meet(self, until: float, loading: Loading) -> None:
        """Wait until all have begun, at most until a time; raise `EngineMismatchError` if one serves another model."""
        waiting = {client.actor.meet.remote(own_version()): client for client in self.clients}
        while waiting:
            ready, _ = ray.wait([*waiting], timeout=max(0.0, until - time.monotonic()))
            if not ready or time.monotonic() > until:
                names = " and ".join(sorted(repr(client.name) for client in waiting.values()))
                raise self._no_room(f"{names} had not started after {self._placing.start_s:g} s")
            client = waiting.pop(ready[0])
            try:
                self._require_alike(client, loading, *ray.get(ready[0]))
            except ActorUnavailableError:  # an actor that existed before has died, and is being restarted
                time.sleep(_AGAIN_S)
                waiting[client.actor.meet.remote(own_version())] = client
            except RayError as error:
                if isinstance(failure := translate(client.name, error), EngineMismatchError):
                    raise failure from error
                raise ClusterError(
                    f"the actor of {client.name!r} could not start: {error}. Each machine of the cluster needs the "
                    "same version of choreo-ray"
                ) from error

    def _require_alike(self, client: RayEngineClient, loading: Loading, model: str, dtype: torch.dtype | None) -> None:
        dtype_name = str(loading.options.get("dtype")).removeprefix("torch.")
        expected: torch.dtype | None = getattr(torch, dtype_name, None)  # None for "auto": each engine chooses
        if model != loading.model or (expected is not None and dtype not in (None, expected)):
            requested = f"{loading.model!r}" if expected is None else f"{loading.model!r} in {expected}"
            serves = f"{model!r}" if dtype is None else f"{model!r} in {dtype}"
            raise EngineMismatchError(
                f"engine {client.name!r} exists already, and serves {serves}, not {requested}: end it with "
                f"RayEngine.end({self._placing.name!r}), or use another name"
            )

    def _no_room(self, why: str) -> ClusterError:
        placing, (every, free) = self._placing, resources()
        needs = " and ".join(f"{value:g} {name}" for name, value in placing.bundle.items()) or "no CPU"
        available = " and ".join(f"{every[name]:g} {name} ({free[name]:g} free)" for name in every)
        return ClusterError(
            f"the cluster cannot place {placing.engines} engines with {needs} each: {why}. It has {available}: request "
            "less, end other programs, or add machines; start_s limits the wait"
        )

    def _load(self) -> None:
        loading = {client.actor.load.remote(): client.name for client in self.clients}
        while loading:
            [reference], _ = ray.wait([*loading])
            name = loading.pop(reference)
            try:
                ray.get(reference)
            except RayError as error:
                raise translate(name, error) from error
