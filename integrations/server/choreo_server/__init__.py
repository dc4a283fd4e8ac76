"""An OpenAI-compatible server on choreo-agents: `choreo serve`, or `server_app` within a program of yours."""

from choreo_server.app import server_app
from choreo_server.limits import Limits
from choreo_server.tenancy import Keys

__all__ = ["Keys", "Limits", "server_app"]
