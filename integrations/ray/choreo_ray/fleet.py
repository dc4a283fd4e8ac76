"""The actors of one front, one for each engine: placed on the cluster, begun, loaded, and ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from choreo_agents import EngineStats
from choreo_agents.engine.elsewhere import Costs
from choreo_agents.errors import EngineMismatchError, InvalidRequestError
from choreo_ray.actor import EngineActor, Loading
from choreo_ray.cluster import Cluster, resources
from choreo_ray.directory import RayDirectory
from choreo_ray.errors import ClusterError, translated
from choreo_ray.far import RayFarEngine
from choreo_ray.measuring import measured_costs

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Of Ray's placement groups."""
_CALLS = 1 << 14
"""At once in an actor: what is too much for its engine waits there, and not before what concerns calls under way."""
_AGAIN_S = 0.1
_CLOSE_S = 30.0
"""Seconds that engines have to write what is to be kept."""


@dataclass(frozen=True)
class Placing:
    """What actors ask of the cluster."""

    engines: int
    num_cpus: float
    num_gpus: float
    """Of each."""
    placement: Strategy | PlacementGroup | None
    """How they lie in a placement group that is made for them, or one that has a bundle for each; None: in none."""
    name: str | None
    """Of actors that outlive this process, and that others find by it; None: they end with it."""
    namespace: str
    start_s: float
    """Seconds in which they have to have found room, and begun."""
    directories: int
    """Shards of a directory for fronts over the same actors; 0: there is none."""

    def __post_init__(self) -> None:
        if isinstance(self.engines, bool) or not isinstance(self.engines, int) or self.engines < 1:
            raise InvalidRequestError(f"engines must be a whole number, at least 1, not {self.engines!r}")
        if isinstance(self.directories, bool) or not isinstance(self.directories, int) or self.directories < 0:
            raise InvalidRequestError(f"directories must be a whole number, not {self.directories!r}")
        if self.start_s <= 0:
            raise InvalidRequestError(f"start_s must be positive, not {self.start_s!r}")
        for what, value in (("num_cpus", self.num_cpus), ("num_gpus", self.num_gpus)):
            if value < 0:
                raise InvalidRequestError(f"{what} must not be negative, but it is {value!r}")
        if isinstance(self.placement, str) and self.placement not in get_args(Strategy):
            ways = ", ".join(map(repr, get_args(Strategy)))
            raise InvalidRequestError(
                f"placement must be one of {ways}, a placement group or None, not {self.placement!r}"
            )
        if self.name is not None and self.placement is not None:
            raise InvalidRequestError("actors with a name outlive the placement group: leave name or placement out")

    @property
    def bundle(self) -> dict[str, float]:
        """Of one engine."""
        return {name: value for name, value in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if value}

    def names(self) -> list[str]:
        """Of the engines."""
        return [f"{self.name or 'engine'}-{number}" for number in range(self.engines)]


def ended(actors: Sequence[Any], *, begun: bool = True) -> None:
    """End actors for good, if they have begun once their engines have written what is to be kept."""
    closing = [each.close.remote() for each in actors if begun]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
    for each in actors:
        ray.kill(each, no_restart=True)


def named(name: str, namespace: str) -> list[Any]:
    """The actors of that name that there are, with those of its directory."""
    every = ray.util.list_named_actors(all_namespaces=True)
    known = (each["name"] for each in every if each["namespace"] == namespace)
    split = ((each, *each.rpartition("-")) for each in known)
    of_it = [each for each, of, _, number in split if of in (name, f"{name}-directory") and number.isdigit()]
    return [ray.get_actor(each, namespace) for each in of_it]


class Actors:
    """One for each engine.

    Args:
        cluster: Where.
        placing: What they ask of it.
        loading: What each of them loads.

    Raises:
        ClusterError: It has no room for them. What `Engine.load` raises: by the first of them that fails.
    """

    def __init__(self, cluster: Cluster, placing: Placing, loading: Loading) -> None:
        self._cluster, self._placing = cluster, placing
        self._group: PlacementGroup | None = None
        self.far: list[RayFarEngine] = []
        self.directory: RayDirectory | None = None
        self._begun = False
        try:
            self._require_possible()
            until = time.monotonic() + placing.start_s
            bundles = self._bundles(until)
            for number, name in enumerate(placing.names()):
                options = self._options(name, None if bundles is None else (bundles, number))
                self.far.append(RayFarEngine(name, ray.remote(EngineActor).options(**options).remote(name, loading)))
            self._wait_until_begun(until)
            self._begun = True
            self._load()
            if placing.name is not None:
                self._require(loading)
            if placing.directories:
                self.directory = RayDirectory.start(placing.directories, name=placing.name, namespace=placing.namespace)
        except BaseException:
            self.close()
            raise

    def costs(self) -> Costs:
        """What Ray takes between them. Raises `EngineLostError`: one has died meanwhile."""
        try:
            return measured_costs([each.actor for each in self.far])
        except RayError as error:
            raise translated(" or ".join(each.name for each in self.far[:2]), error) from error

    def stats(self) -> dict[str, EngineStats]:
        """What each engine holds and has done, by its name; nothing of those that are gone now."""
        asked = {each.name: each.actor.stats.remote() for each in self.far}
        told: dict[str, EngineStats] = {}
        for name, reference in asked.items():
            with suppress(RayError):
                told[name] = ray.get(reference)
        return told

    def close(self) -> None:
        """End them, unless they are to outlive this process."""
        if self._placing.name is None and ray.is_initialized():
            ended([each.actor for each in self.far], begun=self._begun)
            if self.directory is not None:
                self.directory.close()
            if self._group is not None:
                remove_placement_group(self._group)
        self._cluster.close()

    def _require_possible(self) -> None:
        """A cluster that was started here does not grow: what it can never give need not be waited for."""
        if self._cluster.started and any(
            self._placing.engines * value > resources()[0].get(name, 0.0)
            for name, value in self._placing.bundle.items()
        ):
            raise self._no_room("it was started on this machine, and does not grow")

    def _bundles(self, until: float) -> PlacementGroup | None:
        placing = self._placing
        if isinstance(placing.placement, PlacementGroup):
            if (bundles := len(placing.placement.bundle_specs)) < placing.engines:
                raise InvalidRequestError(
                    f"the placement group has {bundles} bundles, and {placing.engines} engines need one each"
                )
            return placing.placement
        if placing.placement is None:
            return None
        bundle = placing.bundle or {"CPU": 0.001}  # a bundle of nothing is refused
        self._group = placement_group([bundle] * placing.engines, strategy=placing.placement)
        if not self._group.wait(max(0.0, until - time.monotonic())):
            raise self._no_room(f"the placement group {placing.placement!r} found none within {placing.start_s:g} s")
        return self._group

    def _options(self, name: str, bundle: tuple[PlacementGroup, int] | None) -> dict[str, Any]:
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
        if placing.name is not None:
            lasting = {"name": name, "namespace": placing.namespace, "lifetime": "detached", "get_if_exists": True}
            options |= lasting
        return options

    def _wait_until_begun(self, until: float) -> None:
        begun = {each.actor.there.remote(): each for each in self.far}
        while begun:
            ready, _ = ray.wait([*begun], timeout=max(0.0, until - time.monotonic()))
            if not ready or time.monotonic() > until:
                names = " and ".join(sorted(repr(each.name) for each in begun.values()))
                raise self._no_room(f"{names} had not begun after {self._placing.start_s:g} s")
            far = begun.pop(ready[0])
            try:
                ray.get(ready[0])
            except ActorUnavailableError:  # one that was there before has died, and is being started again
                time.sleep(_AGAIN_S)
                begun[far.actor.there.remote()] = far
            except RayError as error:
                raise ClusterError(
                    f"the actor of {far.name!r} could not begin: {error}. Each machine of the cluster needs choreo-ray "
                    "in one version"
                ) from error

    def _require(self, loading: Loading) -> None:
        """Raise `EngineMismatchError` if actors that were there before serve another model."""
        dtype = loading.options.get("dtype")
        for each in self.far:
            try:
                name, served = ray.get(each.actor.serves.remote())
            except RayError as error:
                raise translated(each.name, error) from error
            if name != loading.model or dtype not in (None, served):
                asked = f"{loading.model!r}" if dtype is None else f"{loading.model!r} in {dtype}"
                raise EngineMismatchError(
                    f"engine {each.name!r} was there before, and serves {name!r} in {served}, not {asked}: end it with "
                    f"RayEngine.end({self._placing.name!r}), or give yours another name"
                )

    def _no_room(self, why: str) -> ClusterError:
        placing, (every, free) = self._placing, resources()
        asked = " and ".join(f"{value:g} {name}" for name, value in placing.bundle.items()) or "no CPU"
        has = " and ".join(f"{every[name]:g} {name} ({free[name]:g} free)" for name in every)
        return ClusterError(
            f"the cluster has no room for {placing.engines} engines with {asked} each: {why}. It has {has}: "
            "ask for less, end what uses it, or add machines; start_s is how long is waited"
        )

    def _load(self) -> None:
        loading = {each.actor.load.remote(): each.name for each in self.far}
        while loading:
            [done], _ = ray.wait([*loading])
            name = loading.pop(done)
            try:
                ray.get(done)
            except RayError as error:
                raise translated(name, error) from error
