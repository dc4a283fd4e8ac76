"""Rooms that a reader can take in: at most 20 files side by side, and no two classes of one name.

Run as a script, or as a test.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

FILES_SIDE_BY_SIDE = 20
PACKAGE = Path(__file__).parents[2] / "choreo_agents"

CROWDED: Mapping[str, int] = {}
"""Folders that have more files as yet, and how many. Only ever take something off this list."""
NAMED_TWICE: Set[str] = frozenset()
"""Names that several classes have as yet. Only ever take something off this list."""


def crowded(root: Path) -> dict[str, int]:
    """The folders of a tree in which more files stand side by side than a reader can take in."""
    files: defaultdict[str, int] = defaultdict(int)
    for path in root.rglob("*.py"):
        files[path.parent.relative_to(root).as_posix()] += 1
    return {folder: count for folder, count in sorted(files.items()) if count > FILES_SIDE_BY_SIDE}


def named_twice(root: Path) -> dict[str, list[str]]:
    """Class names that a tree has more than once, and where."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(root).as_posix())
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def confusing(root: Path) -> Iterator[str]:
    """All that is wrong with the package, and what need not be excepted any longer."""
    full, known = crowded(root), dict(CROWDED)
    for folder, count in full.items():
        if count > known.get(folder, FILES_SIDE_BY_SIDE):
            yield f"{folder}: {count} files side by side, at most {known.get(folder, FILES_SIDE_BY_SIDE)}: make rooms"
    for folder, count in known.items():
        if full.get(folder, 0) < count:
            yield f"{folder}: {full.get(folder, 0) or 'few'} files side by side: say so in CROWDED, which only shrinks"
    twice = named_twice(root)
    for name in sorted(twice.keys() - NAMED_TWICE):
        yield f"{' and '.join(twice[name])}: {len(twice[name])} classes are called {name}: name each for what it is"
    for name in sorted(NAMED_TWICE - twice.keys()):
        yield f"one class or none is called {name}: take it off NAMED_TWICE, which only shrinks"


if __name__ == "__main__":
    found = list(confusing(PACKAGE))
    sys.stderr.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
