"""Test tools for code built on this package: scripted agents, and checks of engines and attention backends.

`choreo_agents.testing.plugin` has pytest fixtures, `choreo_agents.testing.conformance` the test suite that every
attention backend must pass.
"""

from choreo_agents.testing.script import PromptMessage, Script, ScriptedCall

__all__ = ["PromptMessage", "Script", "ScriptedCall"]
