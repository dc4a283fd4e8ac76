"""The words of the embedded language. Every word here is one token; anything else falls back to bytes."""

from __future__ import annotations

PEOPLE = (
    "Ada", "Ann", "Art", "Ava", "Ben", "Bob", "Carl", "Cleo", "Cora", "Dan", "Dora", "Earl", "Eli", "Ella", "Eve",
    "Fay", "Finn", "Fred", "Gail", "Gina", "Glen", "Hal", "Hope", "Hugo", "Ida", "Ira", "Iris", "Ivan", "Jack",
    "Jane",
    "Joe", "June", "Kate", "Ken", "Kim", "Kurt", "Lena", "Leo", "Lisa", "Lou", "Mark", "Mary", "Max", "Mia", "Nate",
    "Ned", "Nina", "Nora", "Olga", "Omar", "Otto", "Pam", "Paul", "Pia", "Ray", "Rita", "Rosa", "Ruth", "Sam", "Sara",
    "Tess", "Tina", "Vera", "Walt",
)  # fmt: skip
"""Whom the facts are about."""

AGENTS = ("Alice", "Bruno", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Isabel", "Jonas", "Karen", "Lucas")
"""Who speaks: names in the turn header of assistant messages."""

LARGEST_NUMBER = 99
NUMBERS = tuple(str(number) for number in range(LARGEST_NUMBER + 1))
COLORS = ("red", "blue", "green", "black", "white", "pink", "gold", "gray", "brown", "purple", "orange", "silver")
OBJECTS = (
    "kites", "boats", "drums", "bells", "lamps", "books", "coins", "masks", "rings", "stamps",
    "hats", "cups", "keys", "shells", "pens", "chairs", "clocks", "maps", "balls", "stones",
    "bags", "belts", "boots", "bowls", "dolls", "flags", "forks", "gloves", "ropes", "tents",
)  # fmt: skip
CITIES = (
    "Athens", "Berlin", "Boston", "Cairo", "Delhi", "Dublin", "Geneva", "Havana", "Lima", "Lisbon", "London",
    "Madrid",
    "Milan", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Tokyo", "Vienna",
)  # fmt: skip
FOODS = (
    "apples", "beans", "bread", "cheese", "cherries", "corn", "eggs", "figs", "grapes", "honey", "lemons", "melons",
    "mint", "nuts", "olives", "onions", "peas", "plums", "rice", "soup",
)  # fmt: skip
GAUGES = {
    "Heat": ("hot", "cold"),
    "Light": ("bright", "dark"),
    "Noise": ("loud", "quiet"),
    "Power": ("strong", "weak"),
    "Pressure": ("tight", "loose"),
    "Speed": ("fast", "slow"),
}
"""What each gauge shows that is not normal."""
PARTS = ("pump", "valve", "motor", "filter", "cable", "sensor", "heater", "fan", "switch", "pipe")

FUNCTION_WORDS = (
    "a", "about", "from", "out", "results", "steps", "add", "again", "agree", "all", "always", "an", "and",
    "answer", "answers", "are", "as", "at",
    "best", "both", "box", "broken", "by", "call", "can", "candidate", "change", "check", "coins", "cooperate",
    "defect", "do", "does", "each", "find", "first", "follow", "following", "for", "found", "friend", "go", "good",
    "half", "has", "have", "he", "hear", "how", "I", "if", "in", "is", "it", "keep", "know", "last", "like",
    "likes", "list", "make", "many", "me", "minus", "most", "my", "next", "no", "none",
    "normal", "not", "note", "notes", "of", "on", "one", "opposite", "or", "order", "other", "others", "our", "own",
    "part", "parts", "plan", "plus", "points", "question", "read", "report", "result", "right", "round", "rules", "say",
    "says", "see", "share", "she", "so", "start", "sum", "support", "take", "tell", "than", "that", "the", "their",
    "them", "then", "there", "these", "they", "things", "think", "to", "total", "trust", "trusts", "two", "up",
    "visit", "visits", "vote", "was", "we", "what", "where", "which", "who", "will", "with", "write", "wrong", "yes",
    "you", "your",
    "Add", "Agents", "All", "And", "Answer", "Ask", "At", "Call", "Check", "Do", "Find", "Found", "Go", "How", "If",
    "In", "It", "Keep", "List", "My", "No", "None", "Notes", "On", "Part", "Parts", "Question", "Report", "Result",
    "Rules", "Say", "Start", "Support", "Take", "Tell", "That", "The", "Then", "There", "They", "Think", "This",
    "Trust", "Use", "Vote", "We", "What", "When", "Where", "Which", "Who", "With", "Work", "Write", "Yes",
    "You", "Always",
)  # fmt: skip
PUNCTUATION = (".", "?", ":", ",")

ROLES = ("system", "user", "assistant")
BOS, END, PAD = "<s>", "<|end|>", "<pad>"
SPECIAL_TOKENS = (PAD, BOS, END, *(f"<|{role}|>" for role in ROLES))


def words() -> tuple[str, ...]:
    """Every word that is one token when a space stands before it."""
    shown = tuple(word for pair in GAUGES.values() for word in pair)
    parts = (PEOPLE, AGENTS, NUMBERS, COLORS, OBJECTS, CITIES, FOODS, tuple(GAUGES), shown, PARTS, FUNCTION_WORDS)
    return tuple(dict.fromkeys(word for part in parts for word in part))
