"""Small rooms: no file over 400 lines, no class over 250 with its bases of ours. Run as a script, or as a test."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

FILE_LINES, CLASS_LINES = 400, 250
PACKAGE = Path(__file__).parents[2] / "choreo_agents"


def too_large(root: Path) -> Iterator[str]:
    """Every file and class of a tree that is over budget; classes count with their bases in the tree."""
    places: dict[ast.ClassDef, Path] = {}
    sources: dict[Path, dict[str, str]] = {}
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        lines = source.count("\n")
        if lines > FILE_LINES:
            yield f"{path.relative_to(root)}: {lines} lines, at most {FILE_LINES}: split it by meaning"
        nodes = list(ast.walk(ast.parse(source)))
        places |= {node: path.relative_to(root) for node in nodes if isinstance(node, ast.ClassDef)}
        imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
        sources[path.relative_to(root)] = {name.name: each.module or "" for each in imports for name in each.names}
    for node, path in places.items():
        family = _with_bases(node, places, sources)
        length = sum(each.end_lineno - each.lineno + 1 for each in family if each.end_lineno is not None)
        if length > CLASS_LINES:
            bases = ", ".join(base.name for base in family[1:])
            of = f" with its bases {bases}" if bases else ""
            yield f"{path}: class {node.name} has {length} lines{of}, at most {CLASS_LINES}"


def _with_bases(
    node: ast.ClassDef, places: Mapping[ast.ClassDef, Path], sources: Mapping[Path, Mapping[str, str]]
) -> list[ast.ClassDef]:
    """A class and all that it inherits from in the tree, each once."""
    family = [node]
    for each in family:
        for base in each.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            named = [other for other in places if other.name == name]
            here = [other for other in named if places[other] == places[each]]
            room = sources[places[each]].get(name, "").split(".")
            there = [other for other in named if set(places[other].with_suffix("").parts) <= {*room}]
            family.extend(other for other in here or there or named if other not in family)
    return family


if __name__ == "__main__":
    found = list(too_large(PACKAGE))
    sys.stderr.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
