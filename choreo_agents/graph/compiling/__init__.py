"""The steps of `ChoreoGraph.compile`.

Read `charting`, then `flow` and `binding`.
"""
