"""Words of the glossary: where a page first uses one, it leads there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

GLOSSARY = "explanation/glossary.md"
_PAGE = Path(__file__).parents[1] / GLOSSARY
_NAME = re.compile(r"\*\*(.+?)\*\*")
_ROW = re.compile(r"\| (\*\*.+?) \|")
_COMMON = {"message", "method", "branch", "module", "constraint", "first token"}
"""Which say what they say in English, too, on most pages."""
_WITHOUT = ("reference/", "decisions/", "changes.md", "licence.md", "examples/")
"""Pages that are not led from: they are looked things up in, or are code."""
_KEPT = re.compile(r"(`[^`]*`|!?\[[^\]]*\]\([^)]*\)|<[^>]*>|\S+://\S+)")
"""Code, links and HTML."""


def words() -> list[str]:
    """All that are explained."""
    rows = filter(None, map(_ROW.match, _PAGE.read_text().splitlines()))
    return [name for row in rows for name in _NAME.findall(row[1])]


def anchor(word: str) -> str:
    """Where a word stands on its page."""
    return word.replace(" ", "-")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with each page's text."""
    here = page.file.src_uri
    if here == GLOSSARY:
        return _ROW.sub(lambda row: _NAME.sub(lambda name: f"{name[0]}{{ #{anchor(name[1])} }}", row[0]), markdown)
    if here.startswith(_WITHOUT):
        return markdown
    target = posixpath.relpath(GLOSSARY, posixpath.dirname(here) or ".")
    left = {word for word in words() if word not in _COMMON}
    lines, is_code = markdown.split("\n"), False
    for number, line in enumerate(lines):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and not line.startswith(("#", "    ", "<")):
            lines[number] = _linked(line, left, target)
    return "\n".join(lines)


def _linked(line: str, left: set[str], target: str) -> str:
    parts = _KEPT.split(line)
    for place in range(0, len(parts), 2):
        for word in sorted(left, key=len, reverse=True):
            found = re.search(rf"(?<![\w/-]){word}s?(?![\w/-])", parts[place], re.IGNORECASE)
            if found is not None and "](" not in parts[place]:  # one for each stretch of text is enough
                left.discard(word)
                linked = f"[{found[0]}]({target}#{anchor(word)})"
                parts[place] = f"{parts[place][: found.start()]}{linked}{parts[place][found.end() :]}"
    return "".join(parts)
