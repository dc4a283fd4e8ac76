"""What several experiments show alike: plots, and trainings as they go."""
