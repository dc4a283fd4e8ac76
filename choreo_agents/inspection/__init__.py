"""Runs to be looked at: one page of HTML, which fetches nothing and runs no text.

page       the page: `run.html`, which `make page` builds of the sources in `page/`, with what a recording says in it
progress   bars for long work, in terminals and notebooks
"""

from choreo_agents.inspection.page import RunData, RunPage, page_of, run_data, run_page
from choreo_agents.inspection.progress import ProgressBar, progress_bar

__all__ = ["ProgressBar", "RunData", "RunPage", "page_of", "progress_bar", "run_data", "run_page"]
