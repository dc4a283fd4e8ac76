"""`tests/integration/graph/test_graph.py`, on remote engines."""

from integration.graph.test_graph import *  # noqa: F403
