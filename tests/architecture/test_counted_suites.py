"""LangChain's suites are counted by whoever runs them, and a run in which all of one is skipped fails."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN = Path(__file__).parents[2] / "integrations/conftest.py"
SUITES = """
import pytest
class TestRun:
    def test_invoke(self): pass
    @pytest.mark.skip
    def test_image_inputs(self): pass
class TestSkipped:
    @pytest.mark.skip
    def test_pdf_inputs(self): pass
class TestLess:
    def test_invoke(self): pass
    @pytest.mark.skip
    def test_stream(self): pass
"""


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")])
def test_what_is_skipped_and_must_not_be_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # whatever is installed takes its time
    folder = pytester.mkpydir("integrations") / "langchain/tests"
    folder.mkdir(parents=True)
    (pytester.path / "integrations/__init__.py").unlink()
    (pytester.path / "integrations/conftest.py").write_text(OWN.read_text())
    file = folder / "test_standard.py"
    for tests, fails in ((SUITES, True), (SUITES.partition("class TestSkipped")[0], False)):
        file.write_text(tests)
        # In a process of its own: what is counted is the process's.
        result = pytester.runpytest_subprocess("integrations", "-p", "no:cacheprovider", *workers)
        assert result.ret == int(fails)
        told = result.stdout.str()
        assert "langchain-tests, TestRun: 1 passed, 1 skipped" in told
        assert ("langchain-tests, TestLess: skipped ['test_stream']" in told) == fails
        assert ("langchain-tests, TestSkipped: nothing has passed" in told) == fails
