"""HTML pages that show recorded runs, and progress bars. A page is one file: it loads nothing and executes no message.

run_data   a recording as plain JSON, in the page's format
page       the page: `run.html`, which `make page` builds from the sources in `page/`, with the data inserted
progress   progress bars for terminals and notebooks
"""

from choreo_agents.inspection.page import RunPage, page_of, run_page
from choreo_agents.inspection.progress import progress_bar
from choreo_agents.inspection.run_data import run_data

__all__ = ["RunPage", "page_of", "progress_bar", "run_data", "run_page"]
