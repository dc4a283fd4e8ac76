"""What a call to an actor fails with."""

from __future__ import annotations

import pickle

import pytest
from choreo_ray import ClusterError
from choreo_ray.errors import translate
from ray import exceptions as ray_errors

from choreo_agents.errors import ChoreoError, ConstraintError, EngineFailedError, EngineLostError


def raised(cause: Exception) -> ray_errors.RayTaskError:
    """What Ray raises where an actor has raised something."""
    return ray_errors.RayTaskError("run", "Traceback ...", cause, "actor", 1, "127.0.0.1").as_instanceof_cause()


GONE = [
    ray_errors.ActorDiedError(),
    ray_errors.ActorUnavailableError("restarting", None),
    ray_errors.RayActorError(),
    ray_errors.ObjectLostError("00" * 28, None, ""),
    ray_errors.OwnerDiedError("00" * 28, None, ""),
    ray_errors.NodeDiedError("gone"),
    ray_errors.WorkerCrashedError(),
    ray_errors.LocalRayletDiedError(),
    ray_errors.RaySystemError("Ray has not been started yet"),
    ray_errors.OutOfMemoryError("killed"),
    ray_errors.ActorUnschedulableError("no room"),
    ray_errors.TaskCancelledError(),
]


@pytest.mark.parametrize("error", [*GONE, raised(ray_errors.ActorDiedError())], ids=lambda each: type(each).__name__)
def test_who_is_gone_is_lost(error: Exception) -> None:
    found = translate("engine-1", error)
    assert type(found) is EngineLostError and "'engine-1' is lost" in str(found) and "\n" not in str(found)


def test_our_own_errors_are_as_they_were() -> None:
    found = translate("engine-1", raised(ConstraintError("no end", text="half of")))
    assert type(found) is ConstraintError and (str(found), found.text) == ("no end", "half of")


@pytest.mark.parametrize("error", [raised(KeyError("x")), ray_errors.GetTimeoutError("late")])
def test_all_else_is_a_failure_whose_traceback_is_told(error: Exception) -> None:
    found = translate("engine-1", error)
    assert type(found) is EngineFailedError and "'engine-1'" in str(found)


def test_a_cluster_that_is_not_there_is_as_an_engine_that_is_lost() -> None:
    error = pickle.loads(pickle.dumps(ClusterError("nobody is there")))
    assert isinstance(error, EngineLostError) and isinstance(error, ConnectionError) and isinstance(error, ChoreoError)
