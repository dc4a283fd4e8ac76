"""What has failed in an actor, or because it is gone, as one of this package's errors."""

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
    ray_errors.TaskCancelledError,  # by the actor, which takes the router for gone: what a router cancels, it leaves
    ray_errors.WorkerCrashedError,
)


class ClusterError(EngineLostError, ConnectionError):
    """There is no such cluster of Ray's, or it has no room for the engines; the message says what it has."""


def translated(engine: str, error: Exception) -> ChoreoError:
    """What a call to an actor has failed with: our own errors as they were, and all else as what it means here.

    Args:
        engine: The name of what the actor serves.
        error: Ray's.
    """
    if isinstance(error, ray_errors.RayTaskError):
        cause = error.cause
        if isinstance(cause, ChoreoError):
            return cause
        if not isinstance(cause, _GONE):
            return EngineFailedError(
                f"engine {engine!r} has failed with {_in_a_line(cause)}: its traceback is the cause"
            )
    elif not isinstance(error, _GONE):
        return EngineFailedError(f"engine {engine!r} could not be asked: {_in_a_line(error)}")
    return EngineLostError(f"engine {engine!r} is gone, or cannot be reached: {_in_a_line(error)}")


def _in_a_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
