"""The page of a run: one file of HTML that fetches nothing."""

from __future__ import annotations

import html
import json
import tempfile
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from choreo_agents.engine.recording.format import Recording, read_recording
from choreo_agents.errors import InvalidRequestError
from choreo_agents.inspection.run_data import RunData, run_data

_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
"""What could end a block of data, as JSON writes it otherwise."""


@dataclass(frozen=True)
class RunPage:
    """The page of a recording's runs; a notebook shows it in place."""

    recording: Recording = field(repr=False)
    html: str = field(repr=False)
    runs: int
    calls: int

    def write(self, path: str | Path) -> None:
        """Write it to a file, as a whole or not at all, and for its user alone: it has the words of a run.

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
    """The page of a recording's runs: who spoke when, what each read, and what it saved.

    Args:
        path: What `engine.record(path)` has written.
        beside: Another recording, whose runs can be looked at beside these: a fork, say.

    Raises:
        InvalidRequestError: One of them is no recording.
    """
    recording = read_recording(path)
    data = run_data(recording, None if beside is None else read_recording(beside))
    return RunPage(recording, page_of(data), len(data["runs"]), sum(len(run["calls"]) for run in data["runs"]))


def page_of(data: RunData) -> str:
    """A page of HTML that shows runs: self-contained, with a policy by which nothing else is loaded or run.

    Text of messages is data in it: it is written as text, never as markup.

    Args:
        data: From `run_data`.
    """
    template = files("choreo_agents.inspection").joinpath("run.html").read_text(encoding="utf-8")
    before, rest = template.split("{{TITLE}}")
    middle, behind = rest.split("{{DATA}}")
    written = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)
    return "".join((before, html.escape(data["title"]), middle, written, behind))
