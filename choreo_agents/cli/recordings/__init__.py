"""Recordings on the command line: shown, played again, and forked."""
