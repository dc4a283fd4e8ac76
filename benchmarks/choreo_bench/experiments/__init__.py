"""One folder for each command that measures or trains: what it measures, reports, plots, and the command."""
