"""The actors of one router, one for each engine: placed on the cluster, begun, loaded, and ended."""

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
from choreo_ray.errors import ClusterError, translated
from choreo_ray.naming import ended, found_or_made, named
from choreo_ray.placing import Placing
from choreo_ray.remote import COPIED_BYTES
from choreo_ray.remote.protocol import own_version

_CALLS = 1 << 14
"""At once in an actor: what is too much for its engine waits there, and not before what concerns calls under way."""
_AGAIN_S = 0.1


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
        self.far: list[RayEngineClient] = []
        self._made: list[Any] = []
        """Actors that were not there before."""
        try:
            self._require_possible()
            until = time.monotonic() + placing.start_s
            bundles = self._bundles(until)
            for number, name in enumerate(placing.names()):
                bundle = None if bundles is None else (bundles, number)
                self.far.append(RayEngineClient(name, self._actor(name, loading, bundle)))
            self._meet(until, loading)
            self._load()
            self._meet(time.monotonic() + placing.start_s, loading)  # now each knows what its model is in
        except BaseException as error:
            self.undo()
            if isinstance(error, RayError):
                raise ClusterError(f"the cluster has failed while engines were loaded: {error}") from error
            raise
        if placing.name is not None:
            cluster.before_end(f"{placing.namespace}/{placing.name}", self._end_named)

    def copied_bytes(self) -> int:
        """Of KV that may be on its way to each at once: of all together the object store has to spill nothing."""
        return min(COPIED_BYTES, round(object_store_bytes() / (2 * self._placing.engines)))

    def stats(self) -> dict[str, EngineStats]:
        """What each engine holds and has done, by its name; nothing of those that are gone now."""
        asked = {each.name: each.actor.stats.remote() for each in self.far}
        told: dict[str, EngineStats] = {}
        for name, reference in asked.items():
            with suppress(RayError):
                told[name] = ray.get(reference)
        return told

    def undo(self) -> None:
        """End those that were not there before, of which nothing is to be kept."""
        if ray.is_initialized():
            for each in self._made:
                ray.kill(each, no_restart=True)
            self._leave_group()
        self._cluster.close()

    def close(self) -> None:
        """End them, unless they are to outlive this process, and the cluster does."""
        if self._placing.name is None and ray.is_initialized():
            ended([each.actor for each in self.far])
            self._leave_group()
        self._cluster.close()

    def _end_named(self) -> None:
        assert self._placing.name is not None, "others go with who has made them"
        ended(named(self._placing.name, self._placing.namespace))

    def _leave_group(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)

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
        try:
            self._group = placement_group([bundle] * placing.engines, strategy=placing.placement)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"Ray refuses the placement group of bundles {bundle!r}: {error}") from error
        if not self._group.wait(max(0.0, until - time.monotonic())):
            raise self._no_room(f"the placement group {placing.placement!r} found none within {placing.start_s:g} s")
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
        actor, made = found_or_made(EngineActor, options, lasting, placing.namespace, name, loading)
        if made:
            self._made.append(actor)
        return actor

    def _meet(self, until: float, loading: Loading) -> None:
        """Wait until they have begun, until a time at the latest; raise `EngineMismatchError` for what is another's."""
        asked = {each.actor.meet.remote(own_version()): each for each in self.far}
        while asked:
            ready, _ = ray.wait([*asked], timeout=max(0.0, until - time.monotonic()))
            if not ready or time.monotonic() > until:
                names = " and ".join(sorted(repr(each.name) for each in asked.values()))
                raise self._no_room(f"{names} had not begun after {self._placing.start_s:g} s")
            far = asked.pop(ready[0])
            try:
                self._require_alike(far, loading, *ray.get(ready[0]))
            except ActorUnavailableError:  # one that was there before has died, and is being started again
                time.sleep(_AGAIN_S)
                asked[far.actor.meet.remote(own_version())] = far
            except RayError as error:
                if isinstance(found := translated(far.name, error), EngineMismatchError):
                    raise found from error
                raise ClusterError(
                    f"the actor of {far.name!r} could not begin: {error}. Each machine of the cluster needs choreo-ray "
                    "in one version"
                ) from error

    def _require_alike(self, far: RayEngineClient, loading: Loading, model: str, dtype: torch.dtype | None) -> None:
        said = str(loading.options.get("dtype")).removeprefix("torch.")
        wanted: torch.dtype | None = getattr(torch, said, None)  # of "auto", whatever each engine has taken
        if model != loading.model or (wanted is not None and dtype not in (None, wanted)):
            asked = f"{loading.model!r}" if wanted is None else f"{loading.model!r} in {wanted}"
            serves = f"{model!r}" if dtype is None else f"{model!r} in {dtype}"
            raise EngineMismatchError(
                f"engine {far.name!r} was there before, and serves {serves}, not {asked}: end it with "
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
