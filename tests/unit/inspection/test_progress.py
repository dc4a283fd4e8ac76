"""Bars: drawn where somebody looks, by the same calls."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from choreo_agents.inspection import progress_bar


class Terminal(io.StringIO):
    """A terminal that remembers what it was shown."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """What IPython has for a kernel that runs a notebook."""
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)


@pytest.mark.usefixtures("notebook")
def test_a_notebook_is_shown_one_line_that_changes_and_stays(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("reading") as bar:
        for done in range(1, 10_001):
            bar(done, 10_000)
    shown = capsys.readouterr().err
    assert shown.endswith("\n") and "reading: 100%" in shown.split("\r")[-1] and "10000/10000" in shown
    assert shown.count("\r") < 100, "each change is a message to a browser"


@pytest.mark.usefixtures("notebook")
def test_what_is_left_early_stays_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), progress_bar("reading") as bar:
        bar(3, 8)
        bar(4)
        raise RuntimeError
    assert "4/8" in capsys.readouterr().err.split("\r")[-1]


def test_on_a_terminal_it_is_drawn_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("reading") as bar:
        bar(3, 8)
    *drawn, last = terminal.getvalue().split("\r")
    assert any("reading" in line for line in drawn) and not last.strip()


def test_where_nobody_looks_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("reading") as bar:
        bar(3, 8)
    assert not capsys.readouterr().err
