"""What cannot hold for remote engines: unsupported.toml, which only shrinks."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[4] / "tests"
LIST = Path(__file__).with_name("unsupported.toml")


def listed(engine: str = "ray") -> dict[str, str]:
    """Reasons, by file, or by file and test (of one case: with its id), from the folder `tests` of the product on.

    Args:
        engine: Of which value of `--engine`; what is listed for `ray` alone cannot hold there only.
    """
    found: dict[str, str] = {}
    for entry in tomllib.loads(LIST.read_text())["cannot"]:
        for name in entry["tests"] if entry.get("engine", engine) == engine else ():
            assert name not in found, f"{name} is listed twice"
            found[name] = entry["reason"]
    return found


def mark_listed(items: Sequence[pytest.Function], engine: str, *, failing: bool) -> None:
    """Skip what is listed for an engine; or, with `failing`, all else, and expect what is listed to fail."""
    reasons = listed(engine)
    for item in items:
        path = Path(inspect.getfile(inspect.unwrap(item.function)))  # also if another file has imported it
        file = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
        name = f"{file}::{getattr(item, 'originalname', item.name)}"
        reason = reasons.get(file) or reasons.get(name) or reasons.get(f"{file}::{item.name}")
        if reason is None and failing:
            item.add_marker(pytest.mark.skip("it is not listed"))
        elif reason is not None and (not failing or reason == reasons.get(file)):
            item.add_marker(pytest.mark.skip(reason))
        elif reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
