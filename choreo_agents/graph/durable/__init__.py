"""What makes runs last: lineage in LangGraph's stores, committed before a node returns, and read where it is missing.

Read `thread_log`, how it stands there, then `run_lineage`, by which nodes read and write it.
"""
