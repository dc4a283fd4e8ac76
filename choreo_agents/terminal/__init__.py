"""Terminal helpers that all commands share: command groups, options, progress, and errors as one line."""
