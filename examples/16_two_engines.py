"""A debate over two engines in processes of their own: one is killed half-way, and all say what they would have."""

from collections import Counter
from contextlib import suppress

import ray  # pip install choreo-ray
from choreo_ray import ClusterError, RayEngine

from choreo_agents import Engine, Sampling
from choreo_agents.tracing import EngineDown, EventList, KVCopied, RequestRouted
from choreo_agents.workflows import debate

NOTES = {
    "Alice": "Notes: Ann has 3 red kites. Bob has 5 blue boats.",
    "Bruno": "Notes: Bob has 5 blue boats. Ann has 3 red kites.",
    "Clara": "Notes: Ann has 3 red kites. Bob has 9 blue boats.",
}
QUESTION = {"messages": [("user", "What does Bob have?")]}
graph = debate(NOTES, rounds=3, sampling=Sampling(max_tokens=32))


def words(engine, after_round=lambda number: None):
    """What everybody says: within a round who is done first comes first."""
    said = {name: [] for name in NOTES}
    for update in graph.compile(engine=engine).stream(QUESTION, stream_mode="updates"):
        for message in [message for value in update.values() for message in value.get("messages", [])]:
            said[message.name].append(message.text)
            if len({len(texts) for texts in said.values()}) == 1:
                after_round(len(said[message.name]))
    return said


def kill_one(number):
    """The process of the engine with most of it ends, with the KV that it has; Ray starts it again."""
    if number == 1:
        [(name, _)] = Counter(e.engine for e in events.events if isinstance(e, RequestRouted)).most_common(1)
        ray.kill(ray.get_actor(name, "choreo"), no_restart=False)


with Engine.load("embedded") as engine:
    alone = words(engine)

events = EventList()
with RayEngine.load("embedded", engines=2, name="debates", sink=events) as engine:
    together = words(engine, kill_one)
    stats = engine.stats()
with suppress(ClusterError):  # one that was started for them has ended with them
    RayEngine.end("debates")

for name, texts in together.items():
    print(f"{name}: {' / '.join(texts)}")
placed = Counter(event.engine for event in events.events if isinstance(event, RequestRouted))
copied = sum(event.bytes for event in events.events if isinstance(event, KVCopied))
print(f"calls at each engine: {dict(placed)}; lost: {[e.engine for e in events.events if isinstance(e, EngineDown)]}")
print(f"{stats.tokens_encoded} tokens encoded, {stats.tokens_recomputed} computed again, {copied} bytes copied")
print(f"the same words as with one engine: {together == alone}")
