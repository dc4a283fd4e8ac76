"""`tests/integration/engine/test_finish_reasons.py`, on remote engines."""

from integration.engine.test_finish_reasons import *  # noqa: F403
