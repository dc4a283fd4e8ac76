"""HTML page of a recording's runs, in one self-contained file."""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from choreo_agents.engine.recording.format import Recording, read_recording
from choreo_agents.errors import InvalidRequestError
from choreo_agents.inspection.run_data import run_data

_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
"""JSON escapes for characters that could end the page's `<script>` block or its string."""


@dataclass(frozen=True)
class RunPage:
    """The page of a recording's runs; a notebook shows it in place."""

    recording: Recording = field(repr=False)
    html: str = field(repr=False)

    def write(self, path: str | Path) -> None:
        """Write the page to a file, atomically and readable by its user only: it holds the messages of a run.

        Raises:
            InvalidRequestError: The file cannot be written.
        """
        path = Path(path)
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                whole = Path(folder, "page")
                whole.touch(0o600)
                whole.write_text(self.html, encoding="utf-8")
                whole.replace(path)
        except OSError as error:
            raise InvalidRequestError(f"{str(path)!r} cannot be written: {error.strerror}") from error

    def _repr_html_(self) -> str:
        framed = html.escape(self.html)
        return f'<iframe sandbox="allow-scripts" style="width:100%;height:40rem;border:0" srcdoc="{framed}"></iframe>'


def run_page(path: str | Path, beside: str | Path | None = None) -> RunPage:
    """Return the page of a recording's runs: who spoke when, what each call read, and what that saved.

    Args:
        path: A file that `engine.record(path)` has written.
        beside: Another recording, such as a fork, whose runs the page shows beside these.

    Raises:
        InvalidRequestError: One of the files is no recording.
    """
    recording = read_recording(path)
    return RunPage(recording, page_of(run_data(recording, None if beside is None else read_recording(beside))))


def page_of(data: Mapping[str, Any]) -> str:
    """Return a self-contained HTML page of runs, whose content security policy loads and runs nothing else.

    Messages are data in the page: it shows them as text, never as markup.

    Args:
        data: From `run_data`.
    """
    template = files("choreo_agents.inspection").joinpath("run.html").read_text(encoding="utf-8")
    before, after = template.split("{{TITLE}}")
    middle, behind = after.split("{{DATA}}")
    written = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)
    return "".join((before, html.escape(data["title"]), middle, written, behind))
