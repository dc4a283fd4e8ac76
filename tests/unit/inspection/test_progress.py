"""Bars: drawn where somebody looks, by the same calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from choreo_agents.inspection import progress_bar


class Notebook:
    """What IPython has for a kernel that runs a notebook: it keeps what it is shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[str] = []
        ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=self._display))

    def _display(self, bar: Any, *, display_id: bool) -> Notebook:
        assert display_id
        self.update(bar)
        return self

    def update(self, bar: Any) -> None:
        self.shown.append(bar._repr_html_())


def test_a_notebook_is_shown_one_element_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    with progress_bar("<b>reading") as bar:
        for done in range(1, 10_001):
            bar(done, 10_000)
    assert 'max="10000" value="10000"' in notebook.shown[-1] and "<progress></progress>" in notebook.shown[0]
    assert all("&lt;b&gt;reading" in each and "<b>" not in each for each in notebook.shown)
    assert len(notebook.shown) < 100, "each change is a message to a browser"


def test_what_is_left_early_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    with pytest.raises(RuntimeError), progress_bar("reading") as bar:
        bar(3, 8)
        bar(4)
        raise RuntimeError
    assert 'max="8" value="4"' in notebook.shown[-1] and str(bar).startswith("reading: 4/8, ")


def test_on_a_terminal_it_is_drawn_and_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("reading") as bar:
        bar(3, 8)
    told = capsys.readouterr()
    assert "reading" in told.err and "3/8" in told.err and not told.out


def test_where_nobody_looks_nothing_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for told in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(told, raising=False)
    with progress_bar("reading") as bar:
        bar(3, 8)
    assert not capsys.readouterr().err.strip()
