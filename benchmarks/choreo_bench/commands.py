"""The laboratory's commands, as entry points add them to `choreo`: where each is, and what a list says of it."""

from __future__ import annotations

from choreo_agents.cli.commands import of_workflows
from choreo_agents.cli.lazy import Command, Group

EVAL = Group(
    "Score answers, with intervals.",
    {
        "language": Command(
            "choreo_bench.experiments.eval_language.command:language",
            "How well a model speaks the embedded language: accuracy by task, with 95 % intervals.",
        ),
        **of_workflows("choreo_bench.experiments.eval_workflow.command:eval_workflow"),
        "dilemma": Command(
            "choreo_bench.experiments.eval_dilemma.command:eval_dilemma",
            "How often Bob cooperates, by what he sees of Alice, on the same games (table 3 and figure 8 of the "
            "paper).",
        ),
        "untuned": Command(
            "choreo_bench.experiments.eval_untuned.command:untuned",
            "All workflows on the embedded language, untuned: tables 1, 2 and 4 of Prompt Choreography.",
        ),
        "tuned": Command(
            "choreo_bench.experiments.eval_tuned.command:tuned",
            "All workflows before and after distillation: tables 1 to 4 of Prompt Choreography.",
        ),
        "synthesis": Command(
            "choreo_bench.experiments.eval_synthesis.command:synthesis",
            "Merge branches on eleven tasks: what re-anchoring, cache mapper and adapter are each worth "
            "(Parallel-Synthesis).",
        ),
        "pml": Command(
            "choreo_bench.experiments.eval_pml.command:pml",
            "What encoding documents apart costs: fourteen kinds of questions about several documents (Prompt "
            "Cache, table 1).",
        ),
    },
)
BENCH = Group(
    "Measure, with counts and intervals.",
    {
        "engine": Command(
            "choreo_bench.experiments.bench_engine.command:engine",
            "First tokens and decode steps, beside every other engine that is installed, on the same weights.",
        ),
        "step": Command(
            "choreo_bench.experiments.bench_step.command:step",
            "Where the time of a decode step goes, beside the same step through torch's and transformers' own code.",
        ),
        "workflows": Command(
            "choreo_bench.experiments.bench_workflows.command:workflows",
            "The paper's workflows, word for word the same under every method (tables 4 and 5, figures 5 and 7).",
        ),
        "synthesis": Command(
            "choreo_bench.experiments.bench_synthesis.command:synthesis",
            "The first token about branches: merged from their caches, and from their words put one after the other.",
        ),
        "edges": Command(
            "choreo_bench.experiments.bench_edges.command:edges",
            "What each shared edge of a graph saves, and what it changes: the same words with that edge re-encoded.",
        ),
        "pml": Command(
            "choreo_bench.experiments.bench_pml.command:pml",
            "The first token of a prompt: its modules in every memory, and everything encoded from text (Prompt "
            "Cache, 5.4).",
        ),
    },
)
TRAIN = Group(
    "Train, resumably.",
    {
        "embedded": Command(
            "choreo_bench.experiments.train_embedded.command:embedded",
            "Train the embedded model from nothing: about 75 minutes on two CPU cores.",
        ),
        "synthesizer": Command(
            "choreo_bench.experiments.train_synthesizer.command:synthesizer",
            "Teach a model to merge branches from their caches: an adapter for the synthesizer, a mapper for "
            "what it reads.",
        ),
        "distill": Group(
            "Teach a model to read the caches of a workflow: an adapter, from the workflow's own ordinary runs.",
            of_workflows("choreo_bench.experiments.train_distill.command:distill_workflow"),
        ),
    },
)
PML_MEMORY = Command(
    "choreo_bench.experiments.pml_memory.command:memory",
    "Show what a cached token takes in each memory: measured, for the embedded model and any others.",
)
