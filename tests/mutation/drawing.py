"""Draws mutants by chance, as entries for `tests/mutants.toml` whose tests are still to be named.

    python tests/mutation/drawing.py SEED N [SPARE]

Every room gives as many, and after all of them SPARE more, for those that turn out to change nothing. A place that
cannot matter (a docstring, an annotation, the text of an error) is not drawn.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "choreo_agents"
ROOMS = {
    "visibility": (
        "graph/visibility.py",
        "graph/compiling.py",
        "graph/view/bound_engine.py",
        "graph/view/entries.py",
        "graph/view/placed_view.py",
        "graph/view/reader_rules.py",
        "graph/view/view_builder.py",
        "graph/view/view.py",
    ),
    "memory": ("kv", "engine/messages", "engine/request_builder.py", "runtime/loop.py"),
    "seals": (
        "graph/signer.py",
        "engine/messages/seals.py",
        "kv/handle.py",
        "kv/store/spill.py",
        "kv/store/format.py",
        "kv/store/key.py",
        "kv/store/store.py",
    ),
    "audit": ("graph/audit", "engine/inspect.py"),
    "PML": ("pml",),
}
"""Folders and files of each room; a file that one names for itself is not another's, whose folder it may be in."""
COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One text that would become another."""

    file: Path
    start: int
    end: int
    becomes: str


def changes(path: Path) -> Iterator[Change]:
    """All that could be drawn in a file."""
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        return (
            starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def between(left: ast.AST, right: ast.AST, word: str, other: str) -> Iterator[Change]:
        start, end = span(left)[1], span(right)[0]
        text = raw[start:end].decode()
        if text.count(f" {word} ") == 1:
            at = start + len(text[: text.index(f" {word} ") + 1].encode())
            yield Change(path, at, at + len(word), other)

    for node in _walked(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            word, other = COMPARED[type(node.ops[0])]
            yield from between(node.left, node.comparators[0], word, other)
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from between(node.values[0], node.values[1], word, other)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Change(path, span(node)[0], span(node.operand)[0], "")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            word, other = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            yield from between(node.left, node.right, word, other)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield Change(path, *span(node), str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield Change(path, *span(node), str(node.value + 1))
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield Change(path, *span(node), "pass")


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of annotations, docstrings, decorators' arguments and what errors say."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or (isinstance(node, ast.Raise) and name == "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _walked(child)


def entry(change: Change) -> str:
    """A change as an entry of the list, with as many lines around it as make its place the only one."""
    raw = change.file.read_bytes()
    start, end = raw.rfind(b"\n", 0, change.start) + 1, raw.find(b"\n", change.end)
    while raw.count(raw[start:end]) > 1:
        start = raw.rfind(b"\n", 0, start - 1) + 1
    found = raw[start:end].decode()
    becomes = (raw[start : change.start] + change.becomes.encode() + raw[change.end : end]).decode()
    file = change.file.relative_to(ROOT).as_posix()
    line = raw[: change.start].count(b"\n") + 1
    return "\n".join(
        ["[[mutant]]", f'name = "drawn: {file}:{line}"', f'file = "{file}"', f"from = '''{found}'''",
         f"to = '''{becomes}'''", "tests = []", ""]
    )  # fmt: skip


def files_of(room: str) -> list[Path]:
    """Its files, in order.

    Raises:
        FileNotFoundError: The list of rooms is older than the tree.
    """
    others = {PACKAGE / place for name, places in ROOMS.items() if name != room for place in places}
    found: set[Path] = set()
    for place in ROOMS[room]:
        path = PACKAGE / place
        if not path.exists():
            raise FileNotFoundError(f"the room {room!r} has no {place!r} any more: say in ROOMS where it is now")
        found |= {path} if path.is_file() else {*path.rglob("*.py")} - others
    return sorted(found)


def drawn(seed: int, count: int, spare: int = 0) -> list[Change]:
    """So many changes, as evenly from the rooms as they divide; then so many more of each room, to replace some."""
    found: list[Change] = []
    more: list[Change] = []
    for number, room in enumerate(ROOMS):
        order = [change for file in files_of(room) for change in changes(file)]
        Random(f"{seed} {room}").shuffle(order)
        share = count // len(ROOMS) + (number < count % len(ROOMS))
        found += order[:share]
        more += order[share : share + spare]
    return found + more


def main(options: Sequence[str]) -> int:
    sys.stdout.write("\n".join(map(entry, drawn(*map(int, options)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
