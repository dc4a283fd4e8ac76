"""Files: documents, and texts that a schema includes from below its own folder."""

from __future__ import annotations

from pathlib import Path

from choreo_agents.pml.markup.problems import Problems
from choreo_agents.pml.markup.reading import Places, forbidden_character
from choreo_agents.pml.markup.syntax import SourcePlace

MOST_BYTES = 1 << 26
"""Of an included file."""


def read_document(path: Path, problems: Problems) -> str:
    """A document's text, which is UTF-8; raises `OSError` if there is no such file."""
    return _decoded(path.read_bytes(), str(path), problems)


def read_included(folder: Path, name: str, place: SourcePlace, problems: Problems) -> str:
    """The text of a file below a folder, links followed, to the letter but for a line break at its end.

    Empty, and a problem, if it may not or cannot be read.
    """
    expected = f"a UTF-8 file below {str(folder)!r}"
    try:
        root = folder.resolve(strict=True)
        found = (root / name).resolve()
        if not found.is_relative_to(root):
            problems.add(place, f"{name!r} is outside the schema's folder", expected)
        elif not found.is_file():
            problems.add(place, f"there is no file {name!r}", expected)
        elif found.stat().st_size > MOST_BYTES:
            problems.add(place, f"{name!r} is too large to include", f"at most {MOST_BYTES} bytes")
        else:
            text = _decoded(found.read_bytes(), str(found), problems)
            bad = forbidden_character(text)
            if bad is None:
                return text.removesuffix("\n")
            problems.add(
                Places(text, str(found)).at(bad.start()), f"the character {bad.group()!r} is not allowed in XML"
            )
    except (OSError, ValueError, RuntimeError) as error:
        problems.add(place, f"{name!r} cannot be read: {error}", expected)
    return ""


def _decoded(content: bytes, name: str, problems: Problems) -> str:
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig", errors="replace")
        byte = content[error.start]
        problems.add(Places(before, name).at(len(before)), f"the byte 0x{byte:02x} is no UTF-8", "a file in UTF-8")
        return ""
