"""Recorded runs, played on engines that are only counted: what more of them would be worth.

trace        what recorded runs have asked for: messages, calls, what waits for what
costs        what work costs on a machine, and where that was measured
measuring    micro-benchmarks that say so
machine      engines, fronts and a directory as queues, served in simulated time
simulation   plays traces on so many engines; placing calls is the product's own (`engine.elsewhere.fleet`)
rules        other ways to place them, to compare with
"""
