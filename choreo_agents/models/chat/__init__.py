"""Chat formats, derived from a model's chat template: turns, system prompts, thinking and tool calls."""
