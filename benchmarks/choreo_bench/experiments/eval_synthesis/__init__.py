"""How good answers about branches are: from their caches, trained and untrained, and from their words."""
