"""Implementations of the commands that measure or train, a package or module each: measurement, report and figure."""
