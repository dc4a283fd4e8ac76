"""Tree of thoughts (Prompt Choreography, section 4 and figure 6): candidates side by side, votes, the best goes on.

candidates 1 .. B  ->  votes 1 .. V  ->  the best  (->  B candidates that go on from it  ->  votes  ...)  ->  answer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from choreo_agents.graph import END, START, Agent, ChoreoGraph, Send, Worker, send
from choreo_agents.graph.visibility import Mode
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.graphs.election import elect
from choreo_agents.workflows.graphs.thoughts import THINKER, VOTER, TreeState, begin, numbered, sent, stand, votes

FINALIST = "finalist"
Ballot = Callable[[str, str], str | None]
"""What a vote for a candidate says, given its name and its words; None if nobody can vote for it."""


def candidate_name(speakers: Sequence[str], number: int) -> str:
    """Who says the thought of that number, from 0 on through all levels."""
    names = speakers[2:]
    return names[number % len(names)] if names else f"Candidate {number + 1}"


def tree_of_thoughts(
    *,
    branches: int = 8,
    voters: int = 4,
    depth: int = 1,
    keep: int = 1,
    system: str | None = None,
    think: str | None = None,
    go_on: str | None = None,
    vote: str | Sequence[str] | None = None,
    answer: str | None = None,
    lead: str = "",
    ballot: Ballot = lambda name, _: f"{name}.",
    critics: Sequence[str] = (),
    speakers: Sequence[str] = (),
    sampling: Sampling | None = None,
    visibility: Mode = "shared",
) -> ChoreoGraph:
    """The graph of a breadth-first search. A level's candidates are one batch, and so are its votes.

    Args:
        branches: Candidates that go on from each thought that is kept; `voters`: who choose among a level's.
        depth: Levels; `keep`: thoughts that are kept of each.
        system: The public root.
        think: What candidates are asked; `go_on`: from the second level on; `answer`: what is asked at last.
        vote: What voters are asked: all the same, or each another.
        lead: What a vote comes after, behind the voter's own thoughts; `ballot`: what it can be.
        critics: System prompts of the voters, for voters that differ: each is a node of its own, and in turn gets one.
        speakers: Names: of the last speaker, of the voters, and of the candidates; by default `Candidate 1` on.
        sampling: How they choose tokens.
        visibility: How voters and later levels see what was thought.

    Raises:
        ValueError: A number is below 1, or there are names of some speakers only.
    """
    for name, number in (("branches", branches), ("voters", voters), ("depth", depth), ("keep", keep)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    if len(speakers) == 1:
        raise ValueError(f"speakers must name the last speaker and the voters at least, not only {speakers[0]!r}")
    last, voting = speakers[:2] or ("Assistant", "Voter")
    asked = [vote] if vote is None or isinstance(vote, str) else list(vote)
    name_of = partial(candidate_name, speakers)

    def grow(state: Mapping[str, Any]) -> list[Send]:
        kept, first = state["kept"], state["thoughts"]
        if not kept:
            return [thinker.send(state, think, speaker=name_of(index)) for index in range(branches)]
        return [
            thinker.send(state, go_on or think, speaker=name_of(first + number), **sent(state, [thought], visibility))
            for number, thought in enumerate(thought for thought in kept for _ in range(branches))
        ]

    def ballots(state: Mapping[str, Any]) -> list[str | None]:
        return [ballot(name_of(number), words) for number, words in numbered(state)]

    def poll(state: Mapping[str, Any]) -> list[Send]:
        seen = sent(state, state["candidates"], visibility)
        if critics:
            return [send(node, state, **seen) for node in voting_nodes]
        return [voter.send(state, asked[number % len(asked)], **seen) for number in range(voters)]

    def count(state: Mapping[str, Any]) -> dict[str, Any]:
        elected = elect(votes(state, voting_nodes, voters), ballots(state), lead=lead, seats=keep)
        return {"kept": [state["candidates"][index] for index in elected]}

    def next_level(state: Mapping[str, Any]) -> list[Send]:
        if len(state["kept"][0]) < depth:
            return grow(state)
        return [send(FINALIST, state, **sent(state, state["kept"][:1], visibility))]

    def allowed(state: Mapping[str, Any]) -> list[str]:
        return list(dict.fromkeys(each for each in ballots(state) if each is not None))

    judging: Any = {"choices": allowed, "lead": lead, "sampling": sampling}
    thinker, voter = Worker(THINKER, sampling=sampling), Worker(VOTER, speaker=voting, **judging)
    voting_nodes = [f"{VOTER} {number}" for number in range(1, voters + 1)] if critics else [VOTER]
    graph = ChoreoGraph(TreeState, system=system)
    graph.add_node(thinker)
    for number, node in enumerate(voting_nodes):
        told: Any = {"system": critics[number % len(critics)], "prompt": asked[number % len(asked)]} if critics else {}
        graph.add_node(node, Agent(voting, **told, **judging) if critics else voter)
    graph.add_node(FINALIST, Agent(last, prompt=answer, sampling=sampling))
    graph.add_node("stand", lambda state: stand(state, branches), writes=())
    graph.add_node("count", count, writes=())
    graph.add_node("begin", begin, writes=())
    graph.add_edge(START, "begin")
    graph.add_conditional_edges("begin", grow, [THINKER])
    graph.add_edge(THINKER, "stand", visibility=visibility)
    graph.add_conditional_edges("stand", poll, voting_nodes)
    # Votes are counted: who thinks on does not read them.
    graph.add_edge(voting_nodes if critics else VOTER, "count", visibility="private")
    graph.add_conditional_edges("count", next_level, [THINKER, FINALIST])
    graph.share(THINKER, FINALIST, visibility)
    graph.add_edge(FINALIST, END)
    return graph
