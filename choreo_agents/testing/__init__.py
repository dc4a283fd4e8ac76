"""For tests of what is built on this package: agents that say what they are told, and checks of engines and backends.

`choreo_agents.testing.plugin` has fixtures for pytest, `choreo_agents.testing.conformance` what every attention backend
must do.
"""

from choreo_agents.testing.script import PromptMessage, Script, ScriptedCall

__all__ = ["PromptMessage", "Script", "ScriptedCall"]
