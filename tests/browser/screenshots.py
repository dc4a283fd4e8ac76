"""Takes the pictures of the documentation: `PYTHONPATH=tests python -m browser.screenshots docs/images`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from support.browsers import chromium, opened
from support.runs_to_look_at import RUNS, Looked


def main(to: Path) -> None:
    made: dict[str, Looked] = {}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for name, make in RUNS.items():
            made[name] = make(Path(folder), made)
        for name, run, tab, chosen, scheme in (
            ("timeline", "debate", "Timeline", 4, "light"),
            ("view", "look", "Messages", 2, "light"),
        ):
            with opened(browser, made[run].page, color_scheme=scheme) as shown:
                shown.page.locator("svg [role=option]").nth(chosen).click()
                shown.page.get_by_role("tab", name=tab).click()
                shown.page.screenshot(path=to / f"run-page-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
