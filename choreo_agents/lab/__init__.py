"""All that measures, plays and trains the embedded language; the product knows none of it."""
