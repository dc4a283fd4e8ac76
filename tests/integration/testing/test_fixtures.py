"""The fixtures for pytest find what a test has broken, or left behind, in engines that it may never see itself."""

from __future__ import annotations

import pytest
from support.nested import run

BEGIN = """
import pytest
from choreo_agents import Engine
from choreo_agents.testing import Script

def engine():
    return Script(default="Yes.").load()
"""


def outcomes(pytester: pytest.Pytester, tests: str) -> tuple[dict[str, int], str]:
    """How tests of a user's end, and what is printed."""
    pytester.makepyfile(BEGIN + tests)
    result = run(pytester, "-p", "choreo_agents.testing.plugin")
    return result.parseoutcomes(), result.stdout.str()


def test_engines_are_checked_and_closed(pytester: pytest.Pytester) -> None:
    counts, _ = outcomes(
        pytester,
        """
kept = []

def test_one(checked_engines):
    assert checked_engines == []
    kept.append(engine())
    kept.append(kept[0].tenant("ann"))
    with engine() as third:
        third.prefill("<s>Root.")
    assert checked_engines == [*kept, third]

def test_other():
    for each in kept:
        with pytest.raises(Exception, match="closed"):
            each.prefill("<s>Root.")
    outside = engine()
    assert outside.prefill("<s>Root.")
    outside.close()
""",
    )
    assert counts == {"passed": 2}


@pytest.mark.parametrize("closing", ["", "; broken.close()"])
def test_what_is_broken_is_found(pytester: pytest.Pytester, closing: str) -> None:
    counts, out = outcomes(
        pytester,
        f"""
def test_broken(checked_engines):
    broken, other = engine(), engine()
    broken._core.pool.allocate(16, 0){closing}
""",
    )
    assert counts == {"passed": 1, "errors": 1} and "a segment outlived its message" in out


def test_leases_that_are_left_are_found_if_asked(pytester: pytest.Pytester) -> None:
    counts, out = outcomes(
        pytester,
        """
@pytest.mark.usefixtures("checked_engines")
def test_nobody_asks():
    engine().prefill("<s>Root.", author="ann")

@pytest.mark.usefixtures("no_leases_left")
@pytest.mark.parametrize("salt", [None, "secret"])
def test_left(salt):
    made = engine() if salt is None else engine().tenant(salt)
    made.prefill("<s>Root.", author="ann")
    made.prefill("<s>Root.", author="bob")
    if salt is None:
        made.close()

@pytest.mark.usefixtures("no_leases_left")
def test_given_back():
    made = engine()
    with made.scope():
        made.prefill("<s>Root.")
    made.release(made.prefill("<s>Root."))
    tenant = made.tenant("secret")
    tenant.prefill("<s>Root.")
    tenant.close()
""",
    )
    assert counts == {"passed": 4, "errors": 2}
    assert out.count("leases are left over, by authors of messages: {'ann': 2}") >= 2
