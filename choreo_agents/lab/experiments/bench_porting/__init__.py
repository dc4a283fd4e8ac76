"""A stock program, the same with one changed line, and the same with our nodes."""
