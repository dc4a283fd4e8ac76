"""Scenarios that report counts and times."""
