"""One cluster and two actors for all tests, each of which has them for itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from support.ray_cluster import cluster, keep_at_hand
from support.tiny import save_tiny_llama

from choreo_agents import Memory

if TYPE_CHECKING:
    from choreo_ray import RayEngine

keep_at_hand(os.environ)  # before anything here imports Ray, which the tests of `remote` do without

POOL = {"name": "pool", "namespace": "tests", "memory": Memory(kv_budget_bytes=1 << 25)}


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of three layers."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run have."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def address(shared: Path) -> Iterator[str]:
    """Of the cluster, which this process uses."""
    import ray

    with cluster(shared) as found:
        ray.init(address=found, log_to_driver=False, configure_logging=False)
        yield found
        ray.shutdown()


@pytest.fixture
def alone(address: str, shared: Path) -> Iterator[None]:
    """Nobody else uses the cluster."""
    with FileLock(shared / "ray-alone.lock"):
        yield


@pytest.fixture
def router(alone: None) -> Iterator[Callable[..., RayEngine]]:
    """Makes routers over the two actors, which keep nothing for them in the end."""
    from choreo_ray import RayEngine

    made: list[RayEngine] = []

    def make(**options: Any) -> RayEngine:
        made.append(RayEngine.load("embedded", **(POOL | options)))
        return made[-1]

    yield make
    for each in made:
        each.check()
        each.close()
