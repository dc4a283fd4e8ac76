"""One call of one node: what it sees is read, put in place and encoded, then it speaks.

Read `turn`, then `reading`, `view`, `showing`, `placed_view`, `user_turns`, `reencoding` and `bound_engine`; the rest
as they name it.
"""
