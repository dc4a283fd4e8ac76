"""`python -m choreo_server`: what `choreo serve` does."""

import typer

from choreo_server.command import serve

typer.run(serve)
