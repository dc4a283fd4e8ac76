"""Checkpoint to SQLite, lose the engine and its KV cache, and resume: what was said is computed again as it was."""

import tempfile
from pathlib import Path

from langgraph.checkpoint.sqlite import SqliteSaver  # pip install langgraph-checkpoint-sqlite

from choreo_agents import END, START, Agent, ChoreoGraph, Engine

graph = ChoreoGraph(system="Work it out in steps.")
graph.add_node(Agent("Alice"))
graph.add_node(Agent("Bruno", prompt="Check it."))
graph.add_edge(START, "Alice").add_edge("Alice", "Bruno", visibility="shared").add_edge("Bruno", END)
thread = {"configurable": {"thread_id": "1"}}


def one_process(file, given):
    """What a process does from its start to its end, before a person looks at it or after.

    Under the same salt each knows who said what; without one, what was said in another process counts as input.
    """
    with Engine.load("embedded", salt="a secret of yours") as engine, SqliteSaver.from_conn_string(str(file)) as saver:
        app = graph.compile(saver, engine=engine, interrupt_before=["Bruno"])
        state = app.invoke(given, thread)
        stats = engine.stats()
        print(
            f"  {stats.tokens_encoded} tokens encoded, {stats.tokens_recomputed} computed again; "
            f"next: {app.get_state(thread).next}"
        )
        return state


with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "checkpoints.sqlite"  # beside it: checkpoints.sqlite.lineage
    print("the first process:")
    state = one_process(file, {"messages": [("user", "Start at 5. Add 3. Take 2. Add 9.")]})
    before = {entry["author"]: entry["handle"]["id"] for entry in state["handles"]}
    print("another process, with an empty cache:")
    state = one_process(file, None)  # None: go on
    after = {entry["author"]: entry["handle"]["id"] for entry in state["handles"]}

for message in state["messages"]:
    print(f"{message.name or 'you':>5}: {message.text}")
print(f"the question has {'the same' if before[START] == after[START] else 'another'} handle: same words, same context")
print(f"Alice's has {'the same' if before['Alice'] == after['Alice'] else 'another'}: what she read is known, too")
