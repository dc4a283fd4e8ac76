"""An OpenAI-compatible server on choreo-agents: `choreo serve`, or `server_app` in your own program."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from choreo_server.app import server_app
    from choreo_server.limits import Limits
    from choreo_server.tenancy import Keys

__all__ = ["Keys", "Limits", "server_app"]

_MODULES = {"Keys": "tenancy", "Limits": "limits", "server_app": "app"}

if not TYPE_CHECKING:  # a type checker would accept any name as an attribute

    def __getattr__(name: str) -> object:
        """Import a public name's module on first access: `choreo --help` imports this package and must stay fast."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
