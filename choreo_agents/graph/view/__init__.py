"""Builds the view of one agent call: selects the visible messages, places them, and encodes those that lack an
encoding.

Read `view_builder`, then `entries`, `view`, `placed_view` and `bound_engine`; the rest as they name
it.
"""
