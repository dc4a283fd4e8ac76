"""Streaming to a terminal: words as they are decoded, from agents in a row, and what each call cost when it is done."""

import asyncio

from choreo_agents import END, START, Agent, ChoreoGraph, Engine

graph = ChoreoGraph(system="Work it out in steps.")
graph.add_node("solver", Agent("Alice"))
graph.add_node("checker", Agent("Bruno", prompt="Check it."))
graph.add_edge(START, "solver").add_edge("solver", "checker").add_edge("checker", END)


async def main():
    with Engine.load("embedded") as engine:
        app = graph.compile(engine=engine)
        question = {"messages": [("user", "Start at 5. Add 3. Take 2. Add 9.")]}
        speaking = None
        async for mode, item in app.astream(question, stream_mode=["messages", "custom"]):
            if mode == "messages":
                chunk, metadata = item
                if chunk.id != speaking:  # of agents that speak at once, chunks come in turns: the id tells whose
                    speaking = chunk.id
                    print(f"{metadata['langgraph_node']}: ", end="")
                print(chunk.text, end="", flush=True)
            else:
                print(
                    f"\n  first word after {item['ttft_s'] * 1e3:.0f} ms, done after {item['duration_s'] * 1e3:.0f} ms;"
                    f" {item['tokens_encoded']} tokens encoded, {item['tokens_reused']} reused"
                )


asyncio.run(main())
