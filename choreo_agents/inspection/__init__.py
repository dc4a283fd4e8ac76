"""Runs to be looked at: one page of HTML, which fetches nothing and runs no text.

run_data   what a recording says, as the page takes it
page       the page: `run.html`, which `make page` builds of the sources in `page/`, with the data in it
progress   bars for long work, in terminals and notebooks
"""

from choreo_agents.inspection.page import RunPage, page_of, run_page
from choreo_agents.inspection.progress import ProgressBar, progress_bar
from choreo_agents.inspection.run_data import RunData, run_data

__all__ = ["ProgressBar", "RunData", "RunPage", "page_of", "progress_bar", "run_data", "run_page"]
