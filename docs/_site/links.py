"""Links to what is no page of the documentation lead to the pages that `pages.py` makes of it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HOMES = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "licence.md",
    "README.md": "README.md",
    "examples/README.md": "examples/index.md",
    "integrations/langchain/README.md": "integrations/langchain.md",
    "integrations/ray/README.md": "integrations/ray.md",
    "integrations/server/README.md": "integrations/server.md",
    "docs/README.md": "README.md",
    "docs/decisions": "decisions/index.md",
}
"""Where files and folders of the repository stand in the documentation."""
_PAGES = {page: source for source, page in HOMES.items() if not source.startswith(("README", "docs"))}
_LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\]\()([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with each page's text."""
    here = page.file.src_uri
    source = _PAGES.get(here) or (
        here.replace(".md", ".py") if re.fullmatch(r"examples/\d.*", here) else f"docs/{here}"
    )

    def moved(found: re.Match[str]) -> str:
        start, target, anchor = found.group(1), found.group(2), found.group(3) or ""
        if re.match(r"[a-z]+:", target):
            return found.group(0)
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        home = _home(place)
        if home is None:  # code, which the site does not have: its name is enough
            return (
                f"{start.removeprefix('!').lstrip('[').removesuffix('](')}"
                if (ROOT / place).exists()
                else found.group(0)
            )
        return f"{start}{posixpath.relpath(home, posixpath.dirname(here) or '.')}{anchor})"

    return _LINK.sub(moved, markdown)


def _home(place: str) -> str | None:
    """Where a file of the repository stands in the documentation; None: nowhere."""
    if place in HOMES:
        return HOMES[place]
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    if re.fullmatch(r"examples/.*\.(py|pml)", place):
        return re.sub(r"\.(py|pml)$", ".md", place)
    return None
