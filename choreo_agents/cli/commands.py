"""The product's commands by name: where each is, and what a list says of it."""

from __future__ import annotations

from choreo_agents.cli.lazy import Command, Group

WORKFLOWS = {
    "debate": "Agents answer in parallel rounds, each hearing the others' last answers (MADpar).",
    "direct": "One agent answers at once.",
    "iterative_debate": "Two sides speak in turns until a moderator ends it (MADiter).",
    "tree_of_thoughts": "Candidates side by side, votes, and an answer from the best (ToT).",
    "branch_solve_merge": "A plan in parts, parallel solvers, and a merge (BSM).",
    "multi_qa": "Questions asked apart and answered in one reply (MultiQA).",
    "prisoners_dilemma": "Two players plan in private, talk, and decide at once.",
}
"""What each case says of itself, without importing it."""


def of_workflows(place: str) -> dict[str, Command]:
    """Make a command for each workflow, by what `place` makes of the workflow's name."""
    return {name.replace("_", "-"): Command(place, summary, workflow=name) for name, summary in WORKFLOWS.items()}


_RUN = Group("Run a workflow and watch it.", of_workflows("choreo_agents.cli.run.workflow:run_workflow"))
_MODELS = Group(
    "See whether a model can be served, and how it is fed; or make one to measure with.\n\n"
    "Start with [b]choreo models check PATH[/b] on a folder or hub name: it needs no weights, only config.json and the "
    "tokenizer's files, and ends with 0 if the model can be served, with 2 if it cannot.",
    {
        "random": Command(
            "choreo_agents.cli.models:random",
            "Write a Llama of random weights: it says nothing sensible, and costs what a real one of its shape costs.",
        ),
        "check": Command(
            "choreo_agents.cli.check_model:check",
            "Say whether a model can be served exactly, how agents' conversations look to it, and what it needs.",
        ),
    },
)
_INSPECT = Group(
    "See what an engine holds, or has done.",
    {
        "memory": Command(
            "choreo_agents.cli.inspect:memory",
            "Hold a debate, and show who keeps how much KV memory in which tier at its end.",
        ),
        "record": Command(
            "choreo_agents.cli.recordings.show:record",
            "Show a recording: its calls in order, who made them, how many tokens they said, and words unless masked.",
        ),
        "run": Command(
            "choreo_agents.cli.recordings.page:run",
            "Write a page of HTML that shows a recording's runs: who spoke when, what each read, and what it saved.",
        ),
    },
)
_STORE = Group(
    "Keep in order what lets runs go on in another process: their lineage.\n\n"
    "It stands in a file beside that of a SQLite checkpointer, [b]states.sqlite.lineage[/b], or in the store that a "
    "graph was compiled with.",
    {
        "check": Command(
            "choreo_agents.cli.store:check",
            "Read all of a store: what is damaged, what is missing, and what nobody needs.",
        ),
        "compact": Command(
            "choreo_agents.cli.store:compact",
            "Delete what nobody needs, and threads that nobody has written to for long; make the file smaller.",
        ),
    },
)
_PML = Group(
    "Schemas whose modules are encoded once, and prompts of them.",
    {
        "check": Command(
            "choreo_agents.cli.pml:check",
            "Say all that is wrong in schemas and prompts: file, line, column, and what was expected there.",
        ),
        "layout": Command(
            "choreo_agents.cli.pml:layout",
            "Show the positions of a schema's texts, slots, modules and unions, as a model's tokenizer counts them.",
        ),
        "run": Command(
            "choreo_agents.cli.pml:run_prompt",
            "Answer a prompt over encoded modules, and count the tokens that are encoded and read from the cache.",
        ),
    },
    elsewhere={"memory": "choreo-bench"},
)

CHOREO = Group(
    "LangGraph agents that hand each other [b]KV-cache handles[/b] instead of strings.\n\n"
    "Start with [b]choreo run debate[/b]: three agents debate on the embedded model.",
    {
        "run": _RUN,
        "audit": Command(
            "choreo_agents.cli.audit:audit",
            "Who can be influenced by which private context, and how: proved from the graph alone.",
        ),
        "replay": Command(
            "choreo_agents.cli.recordings.replay:replay",
            "Play a recording again, without running its functions and tools, and say what differs.",
        ),
        "fork": Command(
            "choreo_agents.cli.recordings.fork:fork",
            "Go on from a recording otherwise: only what the change can reach is computed again.",
        ),
        "models": _MODELS,
        "inspect": _INSPECT,
        "store": _STORE,
        "pml": _PML,
        "words": Command(
            "choreo_agents.cli.words:words",
            "Say what words mean that our error messages and pages use: those given, or all.",
        ),
    },
    elsewhere={"serve": "choreo-server", "eval": "choreo-bench", "bench": "choreo-bench", "train": "choreo-bench"},
)
"""All that `choreo` does by itself; distributions add more (see `choreo_agents.cli.lazy.ENTRY_POINTS`)."""
