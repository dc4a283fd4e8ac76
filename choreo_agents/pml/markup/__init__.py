"""PML markup: syntax trees, parser, checks, and writer."""
