"""A headless Chromium without a network: pages of files, and what they asked for and complained of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
IS_ASKED_FOR = bool(os.environ.get("CHOREO_BROWSER"))
"""Whether a browser has to be there: `make test-browser` says so."""


@dataclass
class Opened:
    """A page in the browser."""

    page: Any
    asked: list[str] = field(default_factory=list)
    """What it has asked for beside itself."""
    complaints: list[str] = field(default_factory=list)
    """Errors, warnings, and scripts that were kept from running."""


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, page: Path | str, **context: Any) -> Iterator[Opened]:
    """A page of a file, or of an address on this machine, with no way to anywhere else."""
    url = page.resolve().as_uri() if isinstance(page, Path) else page
    made = browser.new_context(viewport={"width": 1400, "height": 900}, offline=isinstance(page, Path), **context)
    try:
        found = Opened(made.new_page())
        found.page.on("request", lambda request: found.asked.append(request.url) if request.url != url else None)
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on(
            "console", lambda told: found.complaints.append(told.text) if told.type in ("error", "warning") else None
        )
        found.page.goto(url)
        yield found
    finally:
        made.close()
