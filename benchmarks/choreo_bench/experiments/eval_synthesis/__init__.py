"""Scores of answers about branches: from their caches, trained and untrained, and from their text."""
