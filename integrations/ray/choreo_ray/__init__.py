"""Engines of choreo-agents in actors of Ray's: `RayEngine.load` in the place of `Engine.load`."""

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ModuleNotFoundError("choreo_ray needs Ray, which is not installed: pip install choreo-ray", name="ray")

from choreo_ray.engine import RayEngine
from choreo_ray.errors import ClusterError

__all__ = ["ClusterError", "RayEngine"]
