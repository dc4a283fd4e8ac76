"""Code lines are counted as a reader would, and a distribution that outgrows its number is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from architecture import weight

SOURCE = '''"""A module."""

# A comment.


class Message:
    """What was said."""

    words: str
    """Attributes have docstrings, too."""

    def say(self) -> str:
        """Say it."""
        return """two
lines"""
'''


def test_blanks_comments_and_docstrings_are_not_code() -> None:
    assert weight.code_lines(SOURCE) == 5


def test_a_distribution_that_outgrows_its_number_is_named() -> None:
    assert list(weight.too_heavy({"product": 10, "other": 3}, {"product": 10, "other": 5})) == []
    [complaint] = weight.too_heavy({"product": 1_012}, {"product": 1_000})
    assert complaint.startswith("product: 1,012 code lines, and tests/weight.toml says 1,000. Take 12 lines away")


def test_every_distribution_is_weighed() -> None:
    projects = [path for folder in weight.FOLDERS for path in weight.ROOT.glob(f"{folder}pyproject.toml")]
    assert len(weight.distributions()) == len(projects) > 2


@pytest.mark.parametrize(
    ("source", "complaint"),
    [("x = 1\n" * 601, "package/one.py: 601 lines"), ("class A:\n" + "    x = 1\n" * 400, "class A has 401 lines")],
)
def test_what_is_large_is_named(tmp_path: Path, source: str, complaint: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "one.py").write_text(source)
    [found] = weight.large(package)
    assert complaint in found


def test_no_module_is_called_by_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [path for path in weight.ROOT.glob("choreo_agents/**/*") if path.stem in vague]
