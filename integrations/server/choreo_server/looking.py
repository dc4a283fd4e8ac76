"""`/inspect`: pages of a tenant's recordings, rendered from the files on each request."""

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
"""Names of directories and files that may be read: no path separators, no `..`."""
LARGEST = 64 << 20
"""Most bytes of a recording that is shown: each request renders all of it."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PAGE = _HEADERS | {"Content-Security-Policy": "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
"""Headers of a page, whose own policy allows its scripts by their hashes."""


def is_safe_name(name: str) -> bool:
    """Return whether a directory or a file of that name may be read."""
    return _NAME.fullmatch(name) is not None


class Looking:
    """Handlers of `/inspect`.

    Args:
        folder: Directory of recordings: `FOLDER/TENANT/*.jsonl`; without keys `FOLDER/*.jsonl`. None: there is none.
        tenancy: Authenticates the caller.
    """

    def __init__(self, folder: Path | None, tenancy: Tenancy) -> None:
        self._folder, self._tenancy = folder, tenancy
        self._lock = asyncio.Semaphore()

    async def index(self, request: Request) -> Response:
        """List the caller's recordings, the newest first."""
        paths = await asyncio.to_thread(_list_recordings, self._folder_of(request))
        links = "".join(f'<li><a href="inspect/{html.escape(p.name)}">{html.escape(p.stem)}</a></li>' for p in paths)
        body = f"<ul>{links}</ul>" if links else "<p>Nothing was recorded yet.</p>"
        page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Runs</title><h1>Runs</h1>{body}</html>'
        return HTMLResponse(page, headers=_HEADERS)

    async def page(self, request: Request) -> Response:
        """Show the page of a recording, as far as it is written."""
        path = self._folder_of(request) / (name := request.path_params["name"])
        # A symbolic link could lead to another tenant's file.
        if not is_safe_name(name) or path.suffix != ".jsonl" or path.is_symlink() or not path.is_file():
            raise RefusedError(404, "there is no such recording: GET /inspect lists them", "not_found")
        if path.stat().st_size > LARGEST:
            raise RefusedError(
                413, f"it is larger than {LARGEST >> 20} MiB: create its page with choreo inspect run", "too_large"
            )
        async with self._lock:
            return HTMLResponse((await asyncio.to_thread(run_page, path)).html, headers=_PAGE)

    def _folder_of(self, request: Request) -> Path:
        name = self._tenancy.viewer(request)
        if self._folder is None:
            raise RefusedError(404, "there are no recordings: start the server with --recordings FOLDER", "not_found")
        if name is not None and not is_safe_name(name):
            raise RefusedError(404, "the name of this tenant cannot be a folder", "not_found")
        return self._folder if name is None else self._folder / name


def _list_recordings(folder: Path) -> list[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    paths = [path for path in folder.glob("*.jsonl") if is_safe_name(path.name) and not path.is_symlink()]
    return sorted(paths, key=lambda path: -path.stat().st_mtime)
