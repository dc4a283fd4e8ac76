"""Tree of thoughts by hand: candidates side by side, votes by `Send`, and a last word over the best of them alone.

`choreo_agents.workflows.tree_of_thoughts` grows trees of several levels, and keeps several thoughts of each.
"""

from collections import Counter

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, RunOptions, Sampling, Worker, send

*THINKERS, VOTER, CHECKER = ["Alice", "Bruno", "Clara", "David", "Emma", "Felix", "Grace", "Henry"]
VOTE = "I vote for"
WARM = Sampling(temperature=0.7, max_tokens=64)


def grow(state):
    return [thinker.send(state, speaker=name) for name in THINKERS]  # one batch over one encoding of the question


def results(state):
    """What each candidate ends with, by message id."""
    return {message.id: message.text.split()[-1] for message in state["messages"] if message.name == "thinker"}


def poll(state):
    return [voter.send(state, "Which result is right?") for _ in range(3)]


def best(state):
    votes = Counter(m.text.rpartition(VOTE)[2].strip() for m in state["messages"] if m.name == "voter")
    [(elected, _)] = votes.most_common(1)
    thought = next(message for message, result in results(state).items() if result == elected)
    question = state["messages"][0].id
    return send("checker", state, shared=[question, thought])  # handles: neither is encoded again


thinker = Worker("thinker", sampling=WARM)
voter = Worker(
    "voter", speaker=VOTER, answer_prefix=VOTE, choices=lambda state: [*results(state).values()], sampling=WARM
)
graph = ChoreoGraph(system="Work it out in steps.")
graph.add_node(thinker).add_node(voter).add_node("checker", Agent(CHECKER, prompt="Check it."))
# Both wait for all branches. They write no messages, so who comes after "stand" sees who came before it.
graph.add_node("stand", lambda state: {}, writes=()).add_node("count", lambda state: {}, writes=())
graph.add_conditional_edges(START, grow, ["thinker"])
graph.add_edge("thinker", "stand")
graph.add_conditional_edges("stand", poll, ["voter"])
graph.add_edge("voter", "count")
graph.add_conditional_edges("count", best, ["checker"], visibility={"thinker": "shared"})
graph.add_edge("checker", END)

with Engine.load("embedded") as engine:
    app = graph.compile(engine=engine)
    question = {"messages": [("user", "Start at 5. Add 3. Take 2. Add 9.")]}
    state = app.invoke(question, {"configurable": {"choreo": RunOptions(seed=4)}})
    for message in state["messages"]:
        print(f"{message.name or 'you':>8}: {message.text}")
    stats = engine.stats()
    print(f"{stats.tokens_encoded} tokens encoded, {stats.tokens_reused} reused from the cache")
