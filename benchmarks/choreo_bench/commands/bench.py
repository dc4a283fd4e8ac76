"""`choreo bench`: times and counts, beside other engines and other ways."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, ModelOption, bar
from choreo_bench.harness import JournalOption, PlotOption, ReportOption, ThreadsOption, numbers, output

IN_BF16 = Loading(dtype="bf16")
TimedModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="[b]embedded[/b], a random Llama (smollm2-135m, six-layers, qwen3-0.6b, llama-8b), or a checkpoint.",
    ),
]
OnlyOption = Annotated[list[str] | None, typer.Option("--only", help="Only if its name contains this; repeatable.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="One run each, with short lengths, as a smoke test.")]
DrawnDtypeOption = Annotated[str, typer.Option("--dtype", help="Dtype of the random weights: bf16, fp32, ...")]
LengthsOption = Annotated[str | None, typer.Option("--lengths", help="Lengths in tokens, separated by commas.")]


def engine(
    like: Annotated[
        Literal["six-layers", "smollm2-135m"], typer.Option(help="The shape of the random Llama that is served.")
    ] = "six-layers",
    dtype: DrawnDtypeOption = "bf16",
    only: OnlyOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each competitor, interleaved.")] = 5,
    scale: Annotated[float, typer.Option(min=0.001, max=1.0, help="Factor of the messages' lengths.")] = 1.0,
    threads: ThreadsOption = 2,
    report: ReportOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time first tokens and decode steps, beside every other engine that is installed, on the same weights.

    [b]no attention[/b] is the model's other operations on the same rows, as transformers runs them; engines with
    operations of their own can be faster. [b]attention calls alone[/b] is one folded call for each shared segment.
    Their sum is what the engine is held against. Engines that are not installed are named as absent. Each scenario is
    written to the report as it ends.

    [b]Examples[/b]

      choreo bench engine --scale 0.05 --repeats 2
      choreo bench engine --only "first token"
      choreo bench engine --like smollm2-135m --dtype fp32 --report speed.md --plot speed.png
    """
    with output(as_json, report, plot) as out:
        import tempfile

        import torch

        from choreo_agents.models.random_llama import SHAPES, save_random_llama
        from choreo_agents.models.weights.dtypes import dtype_named
        from choreo_bench.experiments.bench_engine.measure import measure_all, scenarios_named
        from choreo_bench.experiments.bench_engine.report import as_report, figure

        chosen = scenarios_named(only or (), scale)
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as folder, out.console.status("drawing weights ...") as status:
            path = Path(folder) / like
            save_random_llama(SHAPES[like], path, positions=1 << 15)
            measured = measure_all(
                path,
                dtype_named(dtype) or torch.bfloat16,
                chosen,
                repeats=repeats,
                on_progress=lambda scenario, competitor: status.update(f"{scenario}: {competitor} ..."),
                on_scenario=lambda so_far: out.write(as_report(so_far, chosen, whole=scale == 1.0)),
            )
        out.finish(as_report(measured, chosen, whole=scale == 1.0), lambda: figure(measured))


def step(
    like: Annotated[
        Literal["embedded", "six-layers", "smollm2-135m"],
        typer.Option(help="The embedded model, or the shape of the random Llama that is served."),
    ] = "embedded",
    shapes: Annotated[str, typer.Option(help="Rows x messages, separated by commas.")] = "1x1,1x16,8x1,8x16,64x16",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of all messages of a shape together.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps in each round.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of all shapes.")] = 5,
    threads: ThreadsOption = 1,
    dtype: DrawnDtypeOption = "bf16",
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Measure the cost of sampling instead of the parts of a step.")
    ] = False,
    report: ReportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the time of a decode step goes, beside the same step through torch's and transformers' own code.

    [b]schedule[/b], [b]plan[/b] and [b]account[/b] are Python's work around a forward pass, in CPU time of the engine's
    thread; [b]forward[/b] is the pass. With [b]--sampled[/b] rows draw at T 0.7 and top-p 0.95 from logits that fall as
    a model's do, and from flat ones, beside greedy rows. Weights that are drawn in bf16 are served as this processor
    serves those.

    [b]Examples[/b]

      choreo bench step
      choreo bench step --shapes 1x1,1x16 --tokens 4096 --like smollm2-135m --threads 2
      choreo bench step --sampled --shapes 32x1 --tokens 4096 --like six-layers --threads 2
      choreo bench step --report step.md
    """
    with output(as_json, report) as out:
        import torch

        from choreo_bench.experiments.bench_step.measure import measure_sampled, measure_steps, shapes_named
        from choreo_bench.timing import timed_model

        chosen = shapes_named(shapes, tokens)
        torch.set_num_threads(threads)
        loading = Loading("cpu", "fp32" if dtype == "fp32" else "auto")
        with timed_model(out.console, like, loading, 1, "") as (model, _), bar(out.console) as update:
            update(total=len(chosen) * (4 if sampled else 2) * repeats)
            measure = measure_sampled if sampled else measure_steps
            measured = measure(
                model,
                chosen,
                steps=steps,
                repeats=repeats,
                on_progress=lambda what: update(advance=1, description=what),
            )
        out.finish(measured)


@takes_loading
def workflows(
    model: TimedModelOption = "smollm2-135m",
    n: Annotated[int, typer.Option("--n", min=1, help="Problems.")] = 30,
    only: OnlyOption = None,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "choreo,baseline,naive",
    naive: Annotated[int | None, typer.Option(min=0, help="Number of problems for naive; by default all.")] = None,
    chat: Annotated[
        int, typer.Option(min=0, help="Number of problems for which MADpar also runs on a graph with ChatHuggingFace.")
    ] = 0,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Trees of 2 to 16 branches and 4 to 16 voters instead (figure 5).")
    ] = False,
    critics: Annotated[
        bool, typer.Option("--critics", help="In the sweep, give voters system prompts of their own.")
    ] = False,
    system: Annotated[int, typer.Option(min=1, help="Tokens of a system prompt or instruction.")] = 64,
    problem: Annotated[int, typer.Option(min=1, help="Tokens of a problem.")] = 128,
    utterance: Annotated[str, typer.Option(help="Tokens of each utterance; several with commas.")] = "256",
    kv_gib: Annotated[float, typer.Option("--kv-gib", min=0.01, help="KV memory of an engine, in GiB.")] = 4.0,
    threads: ThreadsOption = 1,
    journal: JournalOption = None,
    report: ReportOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    loading: Loading = IN_BF16,
) -> None:
    """Run the paper's workflows, word for word the same under every method (tables 4 and 5, figures 5 and 7).

    Every call is forced to given tokens, and every decode step is paid for: methods differ in what they encode. The
    baseline has a radix prefix cache, and its calls share steps like choreo's. Runs take turns, each on a fresh engine.

    [b]Examples[/b]

      choreo bench workflows --model embedded --n 5 --utterance 32
      choreo bench workflows --out runs.jsonl --report workflows.md
      choreo bench workflows --sweep --critics --n 1 --methods choreo,baseline --plot sweep.png
      choreo bench workflows --model llama-8b --device cuda --out cuda.jsonl --report cuda.md
    """
    with output(as_json, report, plot) as out:
        import torch

        from choreo_agents.errors import InvalidRequestError
        from choreo_agents.training.journal import Journal
        from choreo_bench.experiments.bench_workflows.measure import (
            WorkflowBench,
            chat_competitor,
            measure_workflows,
            methods_named,
        )
        from choreo_bench.experiments.bench_workflows.report import WorkflowReport
        from choreo_bench.experiments.bench_workflows.scenarios import Lengths, scenarios_named
        from choreo_bench.timing import settings_of, timed_model

        chosen, named = scenarios_named(only or (), sweep=sweep, critics=critics), methods_named(methods)
        if plot is not None and not {"choreo", "baseline"} <= set(named):
            raise InvalidRequestError("--plot draws the baseline's times over choreo's: --methods must name both")
        lengths = [Lengths(system, problem, tokens) for tokens in numbers(utterance)]
        torch.set_num_threads(threads)
        with (
            timed_model(out.console, model, loading, 1, "") as (loaded, path),
            chat_competitor(loaded, path, out.say, wanted=chat > 0) as competitor,
        ):
            bench = WorkflowBench(loaded, named, int(kv_gib * (1 << 30)), naive, competitor, chat)
            settings = settings_of(model, loaded, kv_gib=kv_gib)
            with Journal(journal, settings) as known, bar(out.console) as update:
                runs = sum(len(bench.of(scenario, number)) for scenario in chosen for number in range(n))
                update(total=runs * len(lengths))
                records = [
                    record
                    for size in lengths
                    for record in measure_workflows(
                        bench,
                        chosen,
                        known,
                        problems=n,
                        lengths=size,
                        on_progress=lambda key: update(advance=1, description=key),
                    )
                ]
        result = WorkflowReport(settings, records)
        out.finish(result.report(), result.sweep_figure if sweep else result.lengths_figure)


@takes_loading
def synthesis(
    model: TimedModelOption = "smollm2-135m",
    branches: Annotated[int, typer.Option(min=1, help="Number of branches that are merged.")] = 4,
    lengths: LengthsOption = None,
    quick: QuickOption = False,
    threads: ThreadsOption = 1,
    journal: JournalOption = None,
    report: ReportOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    loading: Loading = IN_BF16,
) -> None:
    """Time the first token about branches: merged from their caches, and from their words one after the other.

    Branches are random tokens that workers have encoded before, each after a shared trunk and a context of its own;
    they have 512, 1024, 2048 and 4096 of them unless you give [b]--lengths[/b].
    From caches only the question is encoded; a cache mapper, of random weights here, makes copies of the branches,
    [b]now[/b] as part of the time or [b]before[/b]. Text is one prompt: of the engine's own baseline, whose prefix
    cache holds the trunk, and of Hugging Face's generate.

    [b]Examples[/b]

      choreo bench synthesis --quick --model six-layers
      choreo bench synthesis --out runs.jsonl --report synthesis.md --plot synthesis.png
      choreo bench synthesis --model llama-8b --device cuda --branches 8 --lengths 4096 --out cuda.jsonl
    """
    with output(as_json, report, plot) as out:
        import torch

        from choreo_agents.training.journal import Journal
        from choreo_bench.experiments.bench_synthesis.measure import REPEATS, WAYS, Sizes, SynthesisBench
        from choreo_bench.experiments.bench_synthesis.report import SynthesisReport
        from choreo_bench.timing import settings_of, timed_model

        sizes = [Sizes(branches, length) for length in numbers(lengths or ("32,64" if quick else "512,1024,2048,4096"))]
        torch.set_num_threads(threads)
        longest = max(size.prompt + size.context for size in sizes)
        shorter = "shorter --lengths, or fewer --branches"
        with timed_model(out.console, model, loading, longest, shorter) as (loaded, path):
            bench = SynthesisBench(loaded, path, loaded.adapter.geometry.dtype, 1 if quick else REPEATS)
            settings = settings_of(model, loaded, repeats=bench.repeats)
            with Journal(journal, settings) as known, bar(out.console) as update:
                update(total=len(sizes) * len(WAYS))
                records = [
                    record
                    for size in sizes
                    for record in bench.measure(size, known, on_progress=lambda key: update(advance=1, description=key))
                ]
        result = SynthesisReport(settings, records)
        out.finish(result.report(), result.figure)


@takes_loading
def edges(
    target: Annotated[str, typer.Argument(help="[b]module:graph[/b]: a graph, compiled or not, or its factory.")],
    path: Annotated[Path, typer.Argument(metavar="INPUTS", help="A JSONL file.")],
    journal: JournalOption = None,
    model: ModelOption = "embedded",
    report: ReportOption = None,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Say what each shared edge of a graph saves, and what it changes: the same words with that edge re-encoded.

    The graph is run on each input, once as it is and once for each shared edge with that edge re-encoded. An input is a
    line: it has [b]messages[/b], and may have [b]systems[/b] (system prompts by node) and a private [b]label[/b].

    The graph is had by importing its module, whose code runs. Modules are looked for in the current folder first.

    [b]Examples[/b]

      choreo bench edges choreo_agents.workflows.graphs.debate:graph examples/data/debates.jsonl
      choreo bench edges my_package.my_graph:app inputs.jsonl --model path/or/hub-name --out runs.jsonl
    """
    with output(as_json, report) as out:
        from choreo_agents.cli.graphs import current_folder, load_graph
        from choreo_bench.experiments.bench_edges import edges_report, measure_edges, read_inputs, shared_edges

        graph, inputs = load_graph(target), read_inputs(path)
        loaded = load(out.console, model, loading)
        with current_folder(), bar(out.console, "runs", len(inputs) * (1 + len(shared_edges(graph)))) as update:
            figures = measure_edges(graph, inputs, model=loaded, out=journal, on_progress=lambda: update(advance=1))
        out.finish(edges_report(figures, len(inputs)))


@takes_loading
def pml(
    model: TimedModelOption = "smollm2-135m",
    lengths: LengthsOption = None,
    new: Annotated[int, typer.Option(min=1, help="Tokens that are encoded with the prompt.")] = 50,
    quick: QuickOption = False,
    schemas: Annotated[
        Path, typer.Option(help="A folder of schemas NAME.pml, each with NAME.prompt.pml, to time as well.")
    ] = Path("examples/pml/large"),
    competitor: Annotated[
        bool, typer.Option("--hugging-face/--no-hugging-face", help="Whether to time its generate, too.")
    ] = True,
    threads: ThreadsOption = 1,
    journal: JournalOption = None,
    report: ReportOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    loading: Loading = IN_BF16,
) -> None:
    """Time the first token of a prompt: its modules in every memory, and everything encoded from text.

    Modules of random words, 1,024 tokens each, are encoded before; the prompt imports all of them, and adds a question
    (Prompt Cache, section 5.4): 1024, 2048, 4096, 5120, 8192 and 16384 tokens unless you give [b]--lengths[/b].
    Then the same for each schema in a folder. The bars hold the modules on the device against the faster of the two
    full encodings, the engine's own and Hugging Face's.

    [b]Examples[/b]

      choreo bench pml --quick --model six-layers
      choreo bench pml --out runs.jsonl --report pml.md --plot pml.png
    """
    with output(as_json, report, plot) as out:
        import torch
        from rich.markup import escape

        from choreo_agents.training.journal import Journal
        from choreo_bench.experiments.bench_pml.measure import (
            REPEATS,
            ModuleBench,
            case_of_length,
            example_cases,
            that_fit,
        )
        from choreo_bench.experiments.bench_pml.report import ModuleReport
        from choreo_bench.timing import settings_of, timed_model

        wanted_lengths = numbers(lengths or ("64,128" if quick else "1024,2048,4096,5120,8192,16384"))
        torch.set_num_threads(threads)
        examples = example_cases(schemas)
        if not examples:
            out.say(f"[dim]no schemas with prompts in {escape(str(schemas))}: see --schemas[/]")
        with timed_model(out.console, model, loading, max(wanted_lengths) + new, "shorter --lengths") as (loaded, path):
            dtype = loaded.adapter.geometry.dtype
            bench = ModuleBench(loaded, path if competitor else None, dtype, 1 if quick else REPEATS)
            cases = [case_of_length(loaded, length, new) for length in wanted_lengths]
            cases += that_fit(examples, loaded, lambda line: out.say(f"[dim]{escape(line)}[/]"))
            settings = settings_of(model, loaded, new=new, schemas=str(schemas))
            with Journal(journal, settings) as known, bar(out.console) as update:
                update(total=sum(len(bench.runs(case)) for case in cases))
                records = [
                    record
                    for case in cases
                    for record in bench.measure(
                        case,
                        known,
                        lambda name, way: update(advance=1, description=f"{escape(name)}: {way} done"),
                    )
                ]
        result = ModuleReport(settings, records)
        out.finish(result.report(), result.figure)
