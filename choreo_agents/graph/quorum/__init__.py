"""A synthesizer that starts before all its branches are in.

Read `rewiring`, by which it is started with them, then `board`, `gathering` and `late_branches`.
"""
