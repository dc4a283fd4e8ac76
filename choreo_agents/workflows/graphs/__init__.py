"""The workflows as graphs."""
