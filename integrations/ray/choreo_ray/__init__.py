"""Engines of choreo-agents in actors of Ray's: `RayEngine.load` in the place of `Engine.load`."""

from choreo_ray.engine import RayEngine
from choreo_ray.errors import ClusterError

__all__ = ["ClusterError", "RayEngine"]
