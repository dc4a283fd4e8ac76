"""`/inspect`: the pages of a tenant's recordings, made anew of what they hold whenever they are asked for."""

from __future__ import annotations

import asyncio
import html
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from choreo_agents.inspection import run_page
from choreo_server.errors import RefusedError
from choreo_server.tenancy import Tenancy

_NAME = re.compile(r"[A-Za-z0-9_@+-][A-Za-z0-9_.@+-]*")
"""What a folder or a file may be called that is looked into: nothing that leads anywhere else."""
LARGEST = 64 << 20
"""Bytes of a recording that is shown: a page is made of all of it, whenever it is asked for."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PAGE = _HEADERS | {"Content-Security-Policy": "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
"""A page says itself which scripts it runs: its own, by their hashes."""


def is_name(name: str) -> bool:
    """Whether a folder or a file of that name may be looked into."""
    return _NAME.fullmatch(name) is not None


class Looking:
    """What tenants may look at.

    Args:
        folder: Of their recordings, `FOLDER/TENANT/*.jsonl`; without keys `FOLDER/*.jsonl`. None: there are none.
        tenancy: Says who asks.
    """

    def __init__(self, folder: Path | None, tenancy: Tenancy) -> None:
        self._folder, self._tenancy = folder, tenancy
        self._one_at_a_time = asyncio.Semaphore()

    async def index(self, request: Request) -> Response:
        """The recordings of who asks, the newest first."""
        found = await asyncio.to_thread(_recordings, self._folder_of(request))
        links = "".join(
            f'<li><a href="inspect/{html.escape(path.name)}">{html.escape(path.stem)}</a></li>' for path in found
        )
        told = f"<ul>{links}</ul>" if links else "<p>Nothing was recorded yet.</p>"
        return HTMLResponse(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Runs</title><h1>Runs</h1>{told}</html>',
            headers=_HEADERS,
        )

    async def page(self, request: Request) -> Response:
        """One of them, as far as it is written."""
        folder, name = self._folder_of(request), request.path_params["name"]
        path = folder / name
        # A link might lead to what is another's.
        if not is_name(name) or path.suffix != ".jsonl" or path.is_symlink() or not path.is_file():
            raise RefusedError(404, "there is no such recording: GET /inspect lists them", "not_found")
        if path.stat().st_size > LARGEST:
            raise RefusedError(
                413, f"it has more than {LARGEST >> 20} MiB: choreo inspect run makes its page", "too_large"
            )
        async with self._one_at_a_time:
            return HTMLResponse((await asyncio.to_thread(run_page, path)).html, headers=_PAGE)

    def _folder_of(self, request: Request) -> Path:
        name = self._tenancy.viewer(request)
        if self._folder is None:
            raise RefusedError(404, "nothing is shown here: start the server with --recordings FOLDER", "not_found")
        if name is None:
            return self._folder
        if not is_name(name):
            raise RefusedError(404, "a tenant of that name has no folder", "not_found")
        return self._folder / name


def _recordings(folder: Path) -> list[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = [path for path in folder.glob("*.jsonl") if is_name(path.name) and not path.is_symlink()]
    return sorted(found, key=lambda path: -path.stat().st_mtime)
