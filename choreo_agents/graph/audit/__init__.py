"""Who can be influenced by whom: before a run from the graph alone (`static`), after it from lineage (`observed`)."""
