"""Engines of choreo-agents in Ray actors: `RayEngine.load` replaces `Engine.load`.

`choreo_ray.remote` has the transport-independent part, and needs no Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from choreo_ray.engine import RayEngine
    from choreo_ray.errors import ClusterError
    from choreo_ray.remote import RouterOptions

__all__ = ["ClusterError", "RayEngine", "RouterOptions"]

_HOMES = {"ClusterError": "errors", "RayEngine": "engine", "RouterOptions": "remote"}

if not TYPE_CHECKING:  # a type checker would believe that the module has every name

    def __getattr__(name: str) -> object:
        """Import a name that needs Ray on first use. Raises `ModuleNotFoundError` if Ray is not installed."""
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
