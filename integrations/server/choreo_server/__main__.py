"""`python -m choreo_server`: the same as `choreo serve`."""

import typer

from choreo_server.command import serve

typer.run(serve)
