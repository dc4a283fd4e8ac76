"""Tree of thoughts (Prompt Choreography, section 4 and figure 6): candidates side by side, votes, the best goes on.

candidates 1 .. B  ->  votes 1 .. V  ->  the best  (->  B candidates that go on from it  ->  votes  ...)  ->  answer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from typing_extensions import TypedDict

from choreo_agents.graph import END, START, Agent, ChoreoGraph, ChoreoState, HandleEntry, Send, Worker, send
from choreo_agents.graph.visibility import Mode, mode_of
from choreo_agents.sampling import Sampling


def elect(votes: Sequence[str], ballots: Sequence[str | None], *, answer_prefix: str = "", seats: int = 1) -> list[int]:
    """The candidates with most votes, as indices: the most votes first, the first of equals before the others.

    Args:
        votes: What voters said: anything up to `answer_prefix`, then a ballot.
        ballots: What a vote for each candidate says; None if nobody can vote for it. Of candidates with one ballot the
            first gets the votes.
        lead: What a vote comes after.
        seats: How many are elected, if there are so many.
    """
    cast = Counter(vote.rpartition(answer_prefix)[2].strip() if answer_prefix else vote.strip() for vote in votes)
    first: dict[str, int] = {}
    for index, ballot in enumerate(ballots):
        if ballot is not None:
            first.setdefault(ballot.strip(), index)
    ranked = sorted(first, key=lambda ballot: (-cast[ballot], first[ballot]))
    others = [index for index in range(len(ballots)) if index not in first.values()]
    return [*(first[ballot] for ballot in ranked), *others][:seats]


THINKER, VOTER = "thinker", "voter"
Thought = list[str]
"""A thought from its first level on, as message ids."""


class TreeState(ChoreoState, total=False):
    """A tree's channels, besides handles and messages."""

    candidates: list[Thought]
    kept: list[Thought]
    thoughts: int
    """Messages that candidates have said, on all levels so far."""
    before: int
    """Entries of the `handles` channel when the tree began: a thread may hold trees that came before."""


def begin(state: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without any thought."""
    return {"candidates": [], "kept": [], "thoughts": 0, "before": len(state.get("handles") or [])}


def stand(state: Mapping[str, Any], branches: int) -> dict[str, Any]:
    """What a level's messages make of the state: each goes on from one of the thoughts that were kept."""
    said = [entry["message_id"] for entry in state["handles"][state["before"] :] if _node(entry) == THINKER]
    new, kept = said[state["thoughts"] :], state["kept"] or [[]]
    candidates = [[*kept[index // branches], message] for index, message in enumerate(new)]
    return {"candidates": candidates, "thoughts": len(said)}


def numbered(state: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The level's candidates: which of all messages each is, from 0 on, and its words."""
    words = {message.id: str(message.text) for message in state["messages"]}
    first = state["thoughts"] - len(state["candidates"])
    return [(first + index, words.get(thought[-1], "")) for index, thought in enumerate(state["candidates"])]


def votes(state: Mapping[str, Any], nodes: Sequence[str], count: int) -> list[str]:
    """The last `count` messages of the voting nodes."""
    words = {message.id: str(message.text) for message in state["messages"]}
    cast = [entry["message_id"] for entry in state["handles"] if _node(entry) in nodes]
    return [words.get(message, "") for message in cast[-count:]]


def _node(entry: HandleEntry) -> str:
    """Who said it, whatever graphs it stands in."""
    return entry["author"].rpartition("|")[2]


class Sent(TypedDict):
    """What a branch sees, as message ids."""

    shared: list[str]
    reencoded: list[str]


def sent(state: Mapping[str, Any], thoughts: Sequence[Thought], visibility: Mode) -> Sent:
    """What a branch is sent to see these thoughts and nothing else but the input."""
    inputs = [entry["message_id"] for entry in state["handles"] if entry["author"] == START]
    chosen = list(dict.fromkeys(message for thought in thoughts for message in thought))
    if mode_of(visibility).shares_kv:
        return Sent(shared=[*inputs, *chosen], reencoded=[])
    return Sent(shared=inputs, reencoded=chosen)


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
    answer_prefix: str = "",
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
        elected = elect(votes(state, voting_nodes, voters), ballots(state), answer_prefix=answer_prefix, seats=keep)
        return {"kept": [state["candidates"][index] for index in elected]}

    def next_level(state: Mapping[str, Any]) -> list[Send]:
        if len(state["kept"][0]) < depth:
            return grow(state)
        return [send(FINALIST, state, **sent(state, state["kept"][:1], visibility))]

    def allowed(state: Mapping[str, Any]) -> list[str]:
        return list(dict.fromkeys(each for each in ballots(state) if each is not None))

    judging: Any = {"choices": allowed, "answer_prefix": answer_prefix, "sampling": sampling}
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
    graph.set_visibility(THINKER, FINALIST, visibility)
    graph.add_edge(FINALIST, END)
    return graph
