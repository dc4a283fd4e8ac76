"""`tests/integration/graph/test_graph_under_attack.py`, on remote engines."""

from integration.graph.test_graph_under_attack import *  # noqa: F403
