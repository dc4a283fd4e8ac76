"""Fail behind a fan-out, lose the process, and go on in another: nobody is asked again, and all is read as it was."""

import tempfile
from pathlib import Path

from langgraph.checkpoint.sqlite import SqliteSaver  # pip install langgraph-checkpoint-sqlite

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Sampling

NOTES = {"Alice": "Ann has 3 red kites.", "Bruno": "Bob has 5 blue boats.", "Clara": "Cleo has 4 green drums."}
SALT, THREAD = "a secret of yours", {"configurable": {"thread_id": "1"}}
power = False


def publish(state):
    """What fails: a mail server, a disk, the electricity."""
    if not power:
        raise OSError("no power")


graph = ChoreoGraph()
for name, notes in NOTES.items():
    question = f"What does {notes.split()[0]} have?"
    graph.add_node(Agent(name, system=f"Notes: {notes}", prompt=question, sampling=Sampling(max_tokens=16)))
    graph.add_edge(START, name)
graph.add_node("publish", publish, writes=()).add_edge([*NOTES], "publish")  # David sees whom it waited for
graph.add_node(Agent("David", prompt="What does Cleo have?", sampling=Sampling(max_tokens=16)))
graph.add_edge("publish", "David").add_edge("David", END)


def one_process(file, given):
    """Loads the model, runs until it ends or fails, and forgets all KV."""
    with Engine.load("embedded", salt=SALT) as engine, SqliteSaver.from_conn_string(str(file)) as saver:
        try:
            state = graph.compile(saver, engine=engine).invoke(given, THREAD)
            for message in state["messages"][1:]:
                print(f"  {message.name}: {message.text}")
        except OSError as error:
            print(f"  failed: {error}")
        stats = engine.stats()
        print(f"  {stats.tokens_encoded} tokens encoded, {stats.tokens_recomputed} computed again")


with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "runs.sqlite"
    print("the first process:")
    one_process(file, {"messages": [("user", "Read your notes.")]})
    power = True
    print("another one:")
    one_process(file, None)  # None: go on
