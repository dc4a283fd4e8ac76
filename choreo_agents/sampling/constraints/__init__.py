"""Constraints on an answer, token by token: a list of choices, a grammar, your own; and thinking before the answer."""
