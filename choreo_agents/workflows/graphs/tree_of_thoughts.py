"""Tree of thoughts (Prompt Choreography, section 4 and figure 6): parallel candidates, votes, and the best continues.

candidates 1 .. B  ->  votes 1 .. V  ->  the best  (->  B candidates that continue it  ->  votes  ...)  ->  answer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from choreo_agents.graph import END, START, Agent, ChoreoGraph, ChoreoState, Send, Worker, send
from choreo_agents.graph.visibility import Mode, mode_of
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.answers import answers_of


def elect(votes: Sequence[str], ballots: Sequence[str | None], *, answer_prefix: str = "", seats: int = 1) -> list[int]:
    """Return the indices of the candidates with most votes, the most votes first, ties in the candidates' order.

    Args:
        votes: Texts of the voters: anything up to `answer_prefix`, then a ballot.
        ballots: Text of a vote for each candidate; None if nobody can vote for it. Of candidates with the same ballot
            the first gets the votes.
        answer_prefix: Text before the ballot.
        seats: How many candidates are elected, at most.
    """
    cast = Counter(vote.rpartition(answer_prefix)[2].strip() if answer_prefix else vote.strip() for vote in votes)
    first: dict[str, int] = {}
    for index, ballot in enumerate(ballots):
        if ballot is not None:
            first.setdefault(ballot.strip(), index)
    ranked = sorted(first, key=lambda ballot: (-cast[ballot], first[ballot]))
    unnamed = [index for index in range(len(ballots)) if index not in first.values()]
    return [*(first[ballot] for ballot in ranked), *unnamed][:seats]


THINKER, VOTER = "thinker", "voter"
Thought = list[str]
"""Message ids of a thought, from the first level on."""


class TreeState(ChoreoState, total=False):
    """Channels of a tree, besides handles and messages."""

    candidates: list[Thought]
    kept: list[Thought]
    thoughts: int
    """Number of candidates' messages on all levels so far."""
    before: int
    """Entries of the `handles` channel when the tree began: a thread may hold earlier trees."""


def begin(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a tree without thoughts."""
    return {"candidates": [], "kept": [], "thoughts": 0, "before": len(state.get("handles") or [])}


def stand(state: Mapping[str, Any], branches: int) -> dict[str, Any]:
    """Return the state after a level's candidates: each appends its message to one of the kept thoughts."""
    entries = state["handles"][state["before"] :]
    ids = [entry["message_id"] for entry in entries if entry["author"].rpartition("|")[2] == THINKER]
    new, parents = ids[state["thoughts"] :], state["kept"] or [[]]
    # Branches are sent parent by parent, `branches` for each, and LangGraph applies writes in the order of sends.
    candidates = [[*parents[index // branches], message] for index, message in enumerate(new)]
    return {"candidates": candidates, "thoughts": len(ids)}


def sent(state: Mapping[str, Any], thoughts: Sequence[Thought], visibility: Mode) -> dict[str, Any]:
    """Return the view of a branch that sees the input and these thoughts only."""
    inputs = [entry["message_id"] for entry in state["handles"] if entry["author"] == START]
    chosen = list(dict.fromkeys(message for thought in thoughts for message in thought))
    if mode_of(visibility).shares_kv:
        return {"shared": [*inputs, *chosen], "reencoded": []}
    return {"shared": inputs, "reencoded": chosen}


FINALIST = "finalist"
Ballot = Callable[[str, str], str | None]
"""Returns the text of a vote for a candidate, given its name and text; None if nobody can vote for it."""


def candidate_name(speakers: Sequence[str], number: int) -> str:
    """Return the name of a candidate, by its number over all levels from 0 on."""
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
    """Return the graph of a breadth-first search. A level's candidates run in parallel, and so do its voters.

    Args:
        branches: Candidates that continue each kept thought.
        voters: Voters on each level.
        depth: Number of levels.
        keep: Thoughts that are kept of each level.
        system: System prompt that all agents share.
        think: Prompt of the candidates.
        go_on: Prompt of the candidates from the second level on; by default `think`.
        vote: Prompt of the voters: one for all, or several in turn.
        answer: Prompt of the final answer.
        answer_prefix: Text before a vote, after the voter's reasoning.
        ballot: Text of a vote for a candidate.
        critics: System prompts of the voters, in turn; with any, each voter is a node of its own.
        speakers: Names of the final agent, of the voters, and of the candidates; by default `Candidate 1` and so on.
        sampling: Sampling of all agents.
        visibility: How voters and later levels see thoughts.

    Raises:
        ValueError: A number is below 1, or `speakers` has a single name.
    """
    for name, number in (("branches", branches), ("voters", voters), ("depth", depth), ("keep", keep)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    if len(speakers) == 1:
        raise ValueError(f"speakers must name at least the last speaker and the voters, not only {speakers[0]!r}")
    last, voting = speakers[:2] or ("Assistant", "Voter")
    asks = [vote] if vote is None or isinstance(vote, str) else list(vote)
    name_of = partial(candidate_name, speakers)

    def grow(state: Mapping[str, Any]) -> list[Send]:
        parents, first = state["kept"], state["thoughts"]
        if not parents:
            return [thinker.send(state, think, speaker=name_of(index)) for index in range(branches)]
        return [
            thinker.send(state, go_on or think, speaker=name_of(first + number), **sent(state, [thought], visibility))
            for number, thought in enumerate(thought for thought in parents for _ in range(branches))
        ]

    def ballots(state: Mapping[str, Any]) -> list[str | None]:
        words = {message.id: str(message.text) for message in state["messages"]}
        numbered = enumerate(state["candidates"], start=state["thoughts"] - len(state["candidates"]))
        return [ballot(name_of(number), words.get(thought[-1], "")) for number, thought in numbered]

    def poll(state: Mapping[str, Any]) -> list[Send]:
        view = sent(state, state["candidates"], visibility)
        if critics:
            return [send(node, state, **view) for node in voting_nodes]
        return [voter.send(state, asks[number % len(asks)], **view) for number in range(voters)]

    def count(state: Mapping[str, Any]) -> dict[str, Any]:
        votes = answers_of(state, *voting_nodes)[-voters:]
        elected = elect(votes, ballots(state), answer_prefix=answer_prefix, seats=keep)
        return {"kept": [state["candidates"][index] for index in elected]}

    def next_level(state: Mapping[str, Any]) -> list[Send]:
        if len(state["kept"][0]) < depth:
            return grow(state)
        return [send(FINALIST, state, **sent(state, state["kept"][:1], visibility))]

    def allowed(state: Mapping[str, Any]) -> list[str]:
        return list(dict.fromkeys(text for text in ballots(state) if text is not None))

    judging: Any = {"choices": allowed, "answer_prefix": answer_prefix, "sampling": sampling}
    thinker, voter = Worker(THINKER, sampling=sampling), Worker(VOTER, speaker=voting, **judging)
    voting_nodes = [f"{VOTER} {number}" for number in range(1, voters + 1)] if critics else [VOTER]
    graph = ChoreoGraph(TreeState, system=system)
    graph.add_node(thinker)
    for number, node in enumerate(voting_nodes):
        role: Any = {"system": critics[number % len(critics)], "prompt": asks[number % len(asks)]} if critics else {}
        graph.add_node(node, Agent(voting, **role, **judging) if critics else voter)
    graph.add_node(FINALIST, Agent(last, prompt=answer, sampling=sampling))
    graph.add_node("stand", lambda state: stand(state, branches), writes=())
    graph.add_node("count", count, writes=())
    graph.add_node("begin", begin, writes=())
    graph.add_edge(START, "begin")
    graph.add_conditional_edges("begin", grow, [THINKER])
    graph.add_edge(THINKER, "stand", visibility=visibility)
    graph.add_conditional_edges("stand", poll, voting_nodes)
    # Votes are only counted: candidates of the next level do not read them.
    graph.add_edge(voting_nodes if critics else VOTER, "count", visibility="private")
    graph.add_conditional_edges("count", next_level, [THINKER, FINALIST])
    graph.set_visibility(THINKER, FINALIST, visibility)
    graph.add_edge(FINALIST, END)
    return graph
