"""Looks at the built site: every public name has its place, and no page fetches anything.

python docs/_site/check.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|link(?=[^>]*rel="(?:stylesheet|preload|icon)"))[^>]*(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
)


def public(module: ModuleType) -> list[str]:
    """Names that a module makes public: those that it lists, or else those that it does not import."""
    if (listed := getattr(module, "__all__", None)) is not None:
        return [name for name in listed if not name.startswith("__")]
    made: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            made.append(node.name)
        elif isinstance(node, ast.Assign):
            made += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in made if name[0] != "_"]


def nowhere() -> list[str]:
    """Public names without a place in the reference."""
    sys.path[:0] = [str(ROOT / "integrations" / name) for name in ("langchain", "server", "ray")]
    missing = []
    for page in sorted((SITE / "reference").glob("*.html")):
        package = page.stem
        if package == "index":
            continue
        told = page.read_text()
        module = importlib.import_module(package)
        for name in public(module):
            if not re.search(rf'id="[\w.]*\b{re.escape(name)}"', told):
                missing.append(f"{package}.{name}")
    return missing


def fetching() -> list[str]:
    """What pages would fetch from elsewhere."""
    return [
        f"{page.relative_to(SITE)}: {url}"
        for page in sorted(SITE.rglob("*.html"))
        for url in _FETCHED.findall(page.read_text())
    ]


def main() -> int:
    pages, missing, fetched = len(list(SITE.rglob("*.html"))), nowhere(), fetching()
    led = sum("glossary.html#" in page.read_text() for page in SITE.rglob("*.html"))
    for line in (*missing, *fetched):
        sys.stderr.write(f"{line}\n")
    counts = f"public names without a page: {len(missing)}; fetched from elsewhere: {len(fetched)}"
    counts += f"; pages that lead to the glossary: {led}"
    sys.stdout.write(f"site/index.html: {pages} pages; {counts}\n")
    return int(bool(missing or fetched or not led))


if __name__ == "__main__":
    sys.exit(main())
