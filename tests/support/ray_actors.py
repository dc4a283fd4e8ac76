"""Which actors there are on the cluster that this process uses."""

from __future__ import annotations

import time

from ray._private import state


def alive() -> set[str]:
    """The actors that there are, but those of the pool."""
    every = [each for each in state.actors().values() if each["State"] != "DEAD"]
    return {each["ActorID"] for each in every if not each["Name"].startswith("pool-")}


def left(expected: set[str]) -> set[str]:
    """The actors that there are once those that were ended are so, which Ray may not know at once."""
    until = time.monotonic() + 5.0
    while (found := alive()) != expected and time.monotonic() < until:
        time.sleep(0.05)
    return found
