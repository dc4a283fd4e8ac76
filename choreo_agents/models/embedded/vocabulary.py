"""The words of the embedded language. Every word here is one token; anything else falls back to bytes."""

from __future__ import annotations

PEOPLE = (
    "Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gail", "Hugo", "Iris", "Jack",
    "Kim", "Leo", "Mia", "Ned", "Olga", "Paul", "Rosa", "Sam", "Tina", "Vera",
)  # fmt: skip
"""Whom the facts are about."""

AGENTS = ("Alice", "Bruno", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
"""Who speaks: names in the turn header of assistant messages."""

NUMBERS = tuple("23456789")
COLORS = ("red", "blue", "green", "black", "white", "pink", "gold", "gray", "brown", "purple")
OBJECTS = (
    "kites", "boats", "drums", "bells", "lamps", "books", "coins", "masks", "rings", "stamps",
    "hats", "cups", "keys", "shells", "pens", "chairs", "clocks", "maps", "balls", "stones",
)  # fmt: skip

FUNCTION_WORDS = (
    "has", "have", "does", "do", "What", "How", "many", "and", "I", "We", "not", "know", "all", "agree",
    "keep", "change", "my", "answer", "Notes", "Agents", "read", "their", "notes", "hear", "each", "other",
    "on", "one", "the", "a", "of", "is", "are", "to", "say", "says", "yes", "no", "0", "1",
)  # fmt: skip
PUNCTUATION = (".", "?", ":", ",")

ROLES = ("system", "user", "assistant")
BOS, END, PAD = "<s>", "<|end|>", "<pad>"
SPECIAL_TOKENS = (PAD, BOS, END, *(f"<|{role}|>" for role in ROLES))


def words() -> tuple[str, ...]:
    """Every word that is one token when a space stands before it."""
    return (*PEOPLE, *AGENTS, *NUMBERS, *COLORS, *OBJECTS, *FUNCTION_WORDS)
