"""The laboratory's commands, as entry points add them to `choreo`: where each is, and what a list says of it."""

from __future__ import annotations

from choreo_agents.cli.commands import of_workflows
from choreo_agents.cli.lazy import Command, Group

EVAL = Group(
    "Score answers, with intervals.",
    {
        "language": Command(
            "choreo_bench.commands.eval:language",
            "Score how well a model speaks the embedded language: accuracy by task, with 95 % intervals.",
        ),
        **of_workflows("choreo_bench.commands.eval:eval_workflow"),
        "dilemma": Command(
            "choreo_bench.commands.eval:dilemma",
            "Score how often Bob cooperates, by what he sees of Alice, on the same games (table 3 and figure 8 of the paper).",  # noqa: E501
        ),
        "untuned": Command(
            "choreo_bench.commands.eval:untuned",
            "Score all workflows on the embedded language, untuned: tables 1, 2 and 4 of Prompt Choreography.",
        ),
        "tuned": Command(
            "choreo_bench.commands.eval:tuned",
            "Score all workflows before and after distillation: tables 1 to 4 of Prompt Choreography.",
        ),
        "synthesis": Command(
            "choreo_bench.commands.eval:synthesis",
            "Merge branches on eleven tasks: what re-anchoring, cache mapper and adapter are each worth (Parallel-Synthesis).",  # noqa: E501
        ),
        "pml": Command(
            "choreo_bench.commands.eval:pml",
            "Score fourteen kinds of questions about documents that were encoded apart, and together (Prompt Cache, table 1).",  # noqa: E501
        ),
    },
)
BENCH = Group(
    "Measure, with counts and intervals.",
    {
        "engine": Command(
            "choreo_bench.commands.bench:engine",
            "Time first tokens and decode steps, beside every other engine that is installed, on the same weights.",
        ),
        "step": Command(
            "choreo_bench.commands.bench:step",
            "Show where the time of a decode step goes, beside the same step through torch's and transformers' own code.",  # noqa: E501
        ),
        "workflows": Command(
            "choreo_bench.commands.bench:workflows",
            "Run the paper's workflows, word for word the same under every method (tables 4 and 5, figures 5 and 7).",
        ),
        "synthesis": Command(
            "choreo_bench.commands.bench:synthesis",
            "Time the first token about branches: merged from their caches, and from their words one after the other.",
        ),
        "edges": Command(
            "choreo_bench.commands.bench:edges",
            "Say what each shared edge of a graph saves, and what it changes: the same words with that edge re-encoded.",  # noqa: E501
        ),
        "pml": Command(
            "choreo_bench.commands.bench:pml",
            "Time the first token of a prompt: its modules in every memory, and everything encoded from text.",
        ),
    },
)
TRAIN = Group(
    "Train, resumably.",
    {
        "embedded": Command(
            "choreo_bench.commands.train:embedded",
            "Train the embedded model from nothing: about 75 minutes on two CPU cores.",
        ),
        "synthesizer": Command(
            "choreo_bench.commands.train:synthesizer",
            "Teach a model to merge branches from their caches: an adapter for the synthesizer, a mapper for what it reads.",  # noqa: E501
        ),
        "distill": Group(
            "Teach a model to read the caches of a workflow: an adapter, from the workflow's own ordinary runs.",
            of_workflows("choreo_bench.commands.train:distill_workflow"),
        ),
    },
)
PML_MEMORY = Command(
    "choreo_bench.commands.memory:memory",
    "Show what a cached token takes in each memory: measured, for the embedded model and any others.",
)
