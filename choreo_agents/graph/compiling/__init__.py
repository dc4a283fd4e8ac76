"""What `ChoreoGraph.compile` makes of what was declared.

Read `charting`, then `promises`, `loops` and `binding`.
"""
