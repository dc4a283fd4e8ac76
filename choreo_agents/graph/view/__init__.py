"""Builds the view of one agent call: selects the visible messages, places them, and encodes those that lack an
encoding.

Read `view_builder`, then `view`, `view_encoder`, `placed_view`, `reencoding` and `bound_engine`; the rest as they name
it.
"""
