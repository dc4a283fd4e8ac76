"""Check that docstrings have a subject, and that names and docs keep to the field's words.

A docstring that begins with a question word or a pronoun ("What is read", "Whether it ends", "Of its tokens") leaves
its reader to guess the subject: at most 3 % of them may. Variables that say nothing, and names that have a standard
term, may not be in the sources at all. The docs have a bound of words, so that a page that grows makes another shrink.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "choreo_agents",
    "benchmarks/choreo_bench",
    "integrations/langchain/langchain_choreo",
    "integrations/ray/choreo_ray",
    "integrations/server/choreo_server",
)
SUBJECTLESS = re.compile(
    r"(what|whether|who|whom|whose|of|how|which|where|why|when|that|if|for|in|from|to|by|with|as|at|on|under|after|before"
    r"|while|until|since|because|than|there|here|its?|they|these|those|this|one|others?|nothing)\b",
    re.IGNORECASE,
)
SUBJECTLESS_SHARE = 0.03
SAY_NOTHING = {"each", "found", "said", "asked", "told"}
"""Names of variables and parameters that carry no kind."""
DOCS_WORDS = 35_000

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def trees(root: Path = ROOT) -> Iterator[tuple[Path, ast.Module]]:
    """Yield each source file of the product, the benchmarks and the integrations, parsed."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root), ast.parse(path.read_text())


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, its classes and its functions, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring


def empty_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield variables and parameters whose names say nothing, with their lines; fields have docs."""
    fields = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and id(node) not in fields
            and node.id in SAY_NOTHING
        ):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in SAY_NOTHING:
            yield node.lineno, node.arg


def docs_words(root: Path = ROOT) -> int:
    """Count the words of all pages under docs, tables and code included."""
    return sum(len(page.read_text().split()) for page in (root / "docs").rglob("*.md"))


def main() -> int:
    """Print what is wrong; return 1 if anything is."""
    number, subjectless, wrong = 0, [], []
    for path, tree in trees():
        for line, docstring in docstrings(tree):
            number += 1
            if SUBJECTLESS.match(docstring):
                subjectless.append(f"{path}:{line}: {docstring.splitlines()[0]}")
        wrong += [f"{path}:{line}: {name!r} says nothing: name what it is" for line, name in empty_names(tree)]
    print(f"{len(subjectless)} of {number:,} docstrings have no subject; {docs_words():,} words of docs")
    if len(subjectless) > SUBJECTLESS_SHARE * number:
        wrong += [*subjectless, f"more than {SUBJECTLESS_SHARE:.0%} of the docstrings have no subject"]
    if docs_words() > DOCS_WORDS:
        wrong.append(f"docs have more than {DOCS_WORDS:,} words: shorten a page")
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
