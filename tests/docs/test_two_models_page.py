"""The page on two models runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/how-to/two-models.md"


def test_the_page_runs(tiny_path: Path) -> None:
    source = PAGE.read_text().replace("/models/large", str(tiny_path))
    blocks = re.findall(r"^```python\n(.*?)^```", source, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    for engine in ("small", "large"):
        names[engine].close()  # type: ignore[attr-defined]
