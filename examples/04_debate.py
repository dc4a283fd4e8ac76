"""A debate, streamed: three agents, one with wrong notes, answer at once, hear each other, and answer again."""

from choreo_agents import Engine, Sampling
from choreo_agents.workflows import debate, final_answer

NOTES = {
    "Alice": "Notes: Ann has 3 red kites. Bob has 5 blue boats.",
    "Bruno": "Notes: Bob has 5 blue boats. Ann has 3 red kites.",
    "Clara": "Notes: Ann has 3 red kites. Bob has 9 blue boats.",
}
ROUNDS = 3
graph = debate(
    NOTES,
    rounds=ROUNDS,
    system="Agents read their notes, hear each other and agree on one answer.",
    sampling=Sampling(max_tokens=32),
    visibility="shared",  # they read each other's own encodings; "reencoded": fresh ones of the words
)

with Engine.load("embedded") as engine:
    app = graph.compile(engine=engine)
    said, costs = [], {}
    # "custom" brings what each call encoded and what it found in the cache, "updates" what it said.
    for mode, item in app.stream({"messages": [("user", "What does Bob have?")]}, stream_mode=["custom", "updates"]):
        if mode == "custom":
            costs[item["handle"]] = f"{item['tokens_encoded']} tokens encoded, {item['tokens_reused']} reused"
            continue
        for message in [message for update in item.values() for message in update.get("messages", [])]:
            said.append(message)
            number = sum(other.name == message.name for other in said)
            cost = costs[message.response_metadata["choreo"]["handle"]]
            print(f"round {number} of {ROUNDS}  {message.name}: {message.text:<38} ({cost})")
    print(f"most end with: {final_answer(said, list(NOTES))}")
