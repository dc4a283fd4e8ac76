"""What it costs that runs last: the same graph with lineage and without."""
