"""What one call of one node sees: found, put in place, and encoded where no encoding of it can be shown.

Read `reading`, then `view`, `showing`, `placed_view`, `reencoding` and `bound_engine`; the rest as they
name it.
"""
