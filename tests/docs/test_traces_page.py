"""The page on traces runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs/how-to/trace-your-graphs.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    first, whole, spans = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(first, names)
    said = capsys.readouterr().out
    assert "('system', 'Notes: Bob has 5 blue boats.')" in said and " length {" in said and "Five. stop {" in said
    assert "[confidential]" in said and "You decide." not in said
    exec(whole, names)
    assert "You decide." in capsys.readouterr().out
    pytest.importorskip("openinference.instrumentation.langchain")
    exec(spans, names)
    assert capsys.readouterr().out.startswith("scout scripted ")
    names["engine"].close()
