"""What `ChoreoGraph.compile` makes of what was declared."""
