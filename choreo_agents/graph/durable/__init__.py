"""What makes runs last: lineage in LangGraph's stores, committed before a node returns, read where it is missing."""
