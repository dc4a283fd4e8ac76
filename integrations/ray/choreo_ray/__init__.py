"""Engines of choreo-agents in actors of Ray's: `RayEngine.load` in the place of `Engine.load`.

`choreo_ray.remote` has what they stand on, and needs no Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from choreo_ray.engine import RayEngine
    from choreo_ray.errors import ClusterError

__all__ = ["ClusterError", "RayEngine"]

_HOMES = {"ClusterError": "errors", "RayEngine": "engine"}

if not TYPE_CHECKING:  # a type checker would take any name to be here

    def __getattr__(name: str) -> object:
        """Import what needs Ray when it is first asked for. Raises `ModuleNotFoundError` if Ray is not installed."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] != "ray":
                raise
            raise ModuleNotFoundError(
                f"{name} needs Ray, which is not installed: pip install choreo-ray", name="ray"
            ) from missing
