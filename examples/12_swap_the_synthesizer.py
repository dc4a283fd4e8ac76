"""A synthesizer that encodes its branches' words again, then one word changed: it reads their caches instead."""

import asyncio
from statistics import median

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Synthesizer, Worker

PARTS = (
    "Ann with red kites, Bob with blue boats, Cleo with green drums",
    "Dan with gold rings, Eve with white cups, Finn with black hats",
)
TASK = f"Write about {', '.join(PARTS)} in parts of 3."


def graph(strategy):
    solver = Worker("solver")
    made = ChoreoGraph(system="Work in parts.")
    made.add_node(Agent("planner")).add_node(solver)
    made.add_node(
        Synthesizer("merger", merges=["planner", "solver"], strategy=strategy, prompt="Write all parts again.")
    )

    def solve(state):
        return [solver.send(state, f"Write part {part}.") for part in (1, 2)]

    made.add_edge(START, "planner").add_conditional_edges("planner", solve, ["solver"])
    return made.add_edge("solver", "merger").add_edge("merger", END)


async def main():
    for strategy in ("text", "sequential"):  # before, after; "parallel" side by side, with an adapter that was trained
        waits = []
        for _ in range(5):
            with Engine.load("embedded") as engine:
                app = graph(strategy).compile(engine=engine)
                async for call in app.astream({"messages": [("user", TASK)]}, stream_mode="custom"):
                    if call["agent"] == "merger":
                        words = call["words"]
                        waits.append(call["ttft_s"] * 1e3)
                encoded = engine.stats().tokens_encoded
        print(f"{strategy}: {words}")
        print(f"{strategy}: first token after {median(waits):.1f} ms, {encoded} tokens encoded in the whole run")


asyncio.run(main())
