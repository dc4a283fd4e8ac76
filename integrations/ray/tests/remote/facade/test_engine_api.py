"""`tests/integration/engine/test_engine_api.py`, on remote engines."""

from integration.engine.test_engine_api import *  # noqa: F403
