"""Durable runs: lineage in LangGraph's stores, committed before a node returns, read after a restart."""
