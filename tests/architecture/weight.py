"""Count code lines by package and distribution; fail when a distribution has more than its number in tests/weight.toml.

A code line is what is left of a file that ruff has formatted at 120 columns, without blank lines, comments and
docstrings. `--lower` writes smaller totals into tests/weight.toml; nothing but an editor writes larger ones, in a
commit that says what users get for it. Large files, classes and folders are named, and fail nothing.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBERS = ROOT / "tests" / "weight.toml"
FOLDERS = ("", "benchmarks/", "integrations/*/")
"""Where distributions are."""
FILE_LINES, CLASS_LINES, FOLDER_FILES = 600, 400, 30
_LEFT_ALONE = re.compile(r"# fmt: (off|on|skip)")
"""What keeps the formatter from lines, which would hide some."""
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def distributions(root: Path = ROOT) -> dict[str, Path]:
    """Find the package of each distribution: the folder beside a pyproject.toml that is a package and not its tests."""
    found = {}
    for project in sorted(each for folder in FOLDERS for each in root.glob(f"{folder}pyproject.toml")):
        name = tomllib.loads(project.read_text())["project"]["name"]
        packages = [each.parent for each in project.parent.glob("*/__init__.py") if each.parent.name != "tests"]
        [found[name]] = packages
    return found


def formatted(package: Path, into: Path) -> Path:
    """Copy a package and format the copy, so that long lines and a setting of the project's save nothing."""
    copied = into / package.name
    shutil.copytree(package, copied, ignore=lambda folder, names: {each for each in names if each == "__pycache__"})
    ruff = str(Path(sys.executable).parent / "ruff")
    layout = ["--isolated", "--line-length", "120", "--target-version", "py311"]
    layout += ["--config", "format.skip-magic-trailing-comma=true"]
    for path in copied.rglob("*.py"):
        path.write_text(_LEFT_ALONE.sub("", path.read_text()))
    subprocess.run([ruff, "format", "--quiet", *layout, str(copied)], check=True)
    return copied


def code_lines(source: str) -> int:
    """Count the lines of a source on which there is code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def weigh(package: Path) -> Counter[str]:
    """Count the code lines of each package within a package; files beside them count as its own, under ''."""
    lines: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copied = formatted(package, Path(folder))
        for path in copied.rglob("*.py"):
            lines["/".join(path.relative_to(copied).parts[:-1][:1])] += code_lines(path.read_text())
    return lines


def large(package: Path) -> Iterator[str]:
    """Name files, classes and folders that are larger than a reader takes in."""
    files: Counter[Path] = Counter()
    for path in sorted(package.rglob("*.py")):
        place, source = path.relative_to(package.parent), path.read_text()
        files[place.parent] += 1
        if (lines := source.count("\n")) > FILE_LINES:
            yield f"{place}: {lines} lines (over {FILE_LINES})"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > CLASS_LINES:
                    yield f"{place}: class {node.name} has {lines} lines (over {CLASS_LINES})"
    yield from (
        f"{folder}: {count} files (over {FOLDER_FILES})" for folder, count in files.items() if count > FOLDER_FILES
    )


def too_heavy(totals: Mapping[str, int], allowed: Mapping[str, int]) -> Iterator[str]:
    """Say which distributions have more code lines than their number, or none."""
    for name, total in totals.items():
        if (more := total - allowed.get(name, 0)) > 0:
            yield (
                f"{name}: {total:,} code lines, and tests/weight.toml says {total - more:,}. Take {more:,} lines away "
                "elsewhere, or raise the number in a commit that says what users get for them."
            )


def main() -> int:
    """Print the table; 1 if a distribution is heavier than its number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write totals that are smaller than their number")
    options = parser.parse_args()
    allowed = tomllib.loads(NUMBERS.read_text())["code_lines"]
    totals = {}
    for name, package in distributions().items():
        lines = weigh(package)
        totals[name] = lines.total()
        print(f"{name}: {totals[name]:,} code lines (at most {allowed.get(name, 0):,})")
        if len(lines) > 1:
            for folder, count in lines.most_common():
                print(f"  {count:7,}  {package.name}/{folder}")
        for complaint in large(package):
            print(f"warning: {complaint}")
    complaints = list(too_heavy(totals, allowed))
    print("".join(f"{line}\n" for line in complaints), end="")
    if options.lower:
        text = NUMBERS.read_text()
        for name, total in totals.items():
            if total < allowed.get(name, 0):
                text = text.replace(f"{name} = {allowed[name]}\n", f"{name} = {total}\n")
        NUMBERS.write_text(text)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
