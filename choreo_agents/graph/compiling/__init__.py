"""What `ChoreoGraph.compile` makes of what was declared.

Read `charting`, then `flow` and `binding`.
"""
