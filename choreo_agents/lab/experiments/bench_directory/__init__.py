"""How many ids a directory is asked for and told in a second, and where it saturates."""
