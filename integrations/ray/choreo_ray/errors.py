"""Errors of Ray and of actors, translated into errors of this package."""

from __future__ import annotations

from ray import exceptions as ray_errors

from choreo_agents.errors import ChoreoError, EngineFailedError, EngineLostError

_GONE = (
    ray_errors.RayActorError,  # died, or cannot be reached now
    ray_errors.ActorUnschedulableError,
    ray_errors.ActorPlacementGroupRemoved,
    ray_errors.ActorHandleNotFoundError,
    ray_errors.LocalRayletDiedError,
    ray_errors.NodeDiedError,
    ray_errors.ObjectLostError,  # its owner's death among others
    ray_errors.OutOfMemoryError,
    ray_errors.RaySystemError,
    ray_errors.RpcError,
    ray_errors.RuntimeEnvSetupError,
    ray_errors.TaskCancelledError,  # by the actor, which took the router for gone; nobody awaits cancelled calls
    ray_errors.WorkerCrashedError,
)


class ClusterError(EngineLostError, ConnectionError):
    """A Ray cluster that is missing, or lacks the resources for the engines; the message says what it has."""


def translate(engine: str, error: Exception) -> ChoreoError:
    """Translate the error of a call to an actor: our own errors stay as they were, others become their meaning here.

    Args:
        engine: Name of the engine that the actor serves.
        error: Error that Ray raised.
    """
    if isinstance(error, ray_errors.RayTaskError):
        cause = error.cause
        if isinstance(cause, ChoreoError):
            return cause
        if not isinstance(cause, _GONE):
            return EngineFailedError(
                f"engine {engine!r} failed with {_first_line(cause)}: see the traceback of the cause"
            )
    elif not isinstance(error, _GONE):
        return EngineFailedError(f"engine {engine!r} could not be called: {_first_line(error)}")
    return EngineLostError(f"engine {engine!r} is lost or unreachable: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
