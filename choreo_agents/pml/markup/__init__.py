"""PML markup: syntax trees, parser, and checks."""
