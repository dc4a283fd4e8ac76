"""All that a graph tells one of its agents about what it may see."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from choreo_agents.engine import Engine
from choreo_agents.graph.audit.chart import names_of
from choreo_agents.graph.audit.guard import Guard
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.view.history import Keep
from choreo_agents.graph.view.imported_prompt import ImportedPrompt
from choreo_agents.graph.view.merged_branches import MergeSpec
from choreo_agents.graph.view.run_place import RunPlace
from choreo_agents.graph.view.view import is_own
from choreo_agents.graph.visibility import Positions, Rule


@dataclass(frozen=True)
class ReaderRules:
    """How one reader's views are made."""

    sources: Mapping[str, Rule]
    """By name, in the order in which it sees those of one superstep."""
    undeclared: Collection[str] | None = None
    """Those of them of which nothing is said by name, since it reads everyone (in a stock graph, `EVERYONE` stands for
    them): what they say confidentially is not for it. None: it reads whom it names."""
    public: str | None = None
    """The system prompt that all views start with."""
    positions: Positions = "sequential"
    systems: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """System prompts that fresh encodings may attend to, by the name of the private context."""
    confidential: frozenset[str] = frozenset()
    """The nodes whose messages are private contexts."""
    guard: Guard = field(default_factory=Guard)
    strict: bool = False
    """Whether what other models have encoded is an error where encodings are shared."""
    by_tenant: bool = False
    """Whether each run is served for the tenant that it is for, and not for whom the engine was loaded."""
    is_node: bool = False
    """Whether the reader is a node of a graph of ours: what it says is in its state."""


@dataclass(frozen=True)
class CallReader:
    """Who reads in one call of one node, and how."""

    place: RunPlace
    persona: str
    """Whose node it is, behind the subgraphs."""
    rules: ReaderRules
    adapter: str | None
    """Encodes what is the reader's own."""
    imported: ImportedPrompt | None
    """What it is told by a prompt of a schema, in place of a system prompt."""
    others: Sequence[Engine] = ()
    """Who else serves the graph: they know from what words were made that another model has said."""
    merging: MergeSpec | None = None
    """Whose messages are merged."""
    confidential: bool = False
    """Whether what it says is a private context."""
    keep: Keep | None = None
    """How much it sees of what it may."""
    words_of: frozenset[tuple[str, str]] = frozenset()
    """Functions, and readers that get the words alone of chat models' answers in these."""

    @property
    def system(self) -> str:
        """The name of the private context that it is told, and asked."""
        return f"{self.persona}.system"

    def gets_words_of(self, entry: HandleEntry) -> bool:
        """Tell whether a message may have attended, in a function, to what is kept from the reader."""
        if not entry.get("answered"):
            return False
        # The function may have invoked a graph: then it is the answer of a node in there.
        names = [*names_of(entry["author"])]
        if self.rules.guard.hidden or any((name, self.place.author) in self.words_of for name in names):
            return True
        # What is asked in a route, or for a prompt, is in the name of an agent, and no pair is known of that.
        nodes, home = self.rules.guard.declared.nodes, self.place.author.rpartition("|")[0]
        known = [nodes[local] for name in names if (local := name.removeprefix(f"{home}|")) in nodes]
        return bool(nodes) and "persona" not in entry and not any(node.is_function for node in known)

    def has_said(self, entry: HandleEntry) -> bool:
        """Whether a message is its own."""
        return is_own(entry, self.place.author, self.persona)
