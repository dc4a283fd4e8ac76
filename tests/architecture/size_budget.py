"""Small rooms: no file over 400 lines, no class over 250. Run as a script, or as a test."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES, CLASS_LINES = 400, 250
PACKAGE = Path(__file__).parents[2] / "choreo_agents"


def too_large(root: Path) -> Iterator[str]:
    """Every file and class of a tree that is over budget."""
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        lines = source.count("\n")
        if lines > FILE_LINES:
            yield f"{path.relative_to(root)}: {lines} lines, at most {FILE_LINES}: split it by meaning"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > CLASS_LINES:
                    yield f"{path.relative_to(root)}: class {node.name} has {length} lines, at most {CLASS_LINES}"


if __name__ == "__main__":
    found = list(too_large(PACKAGE))
    sys.stderr.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
