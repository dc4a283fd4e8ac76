"""`choreo eval pml`, `bench pml` and `pml memory`: what is asked, encoded, kept and said; times are for elsewhere."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support.commands import choreo
from choreo_bench.experiments.bench_pml.measure import (
    ModuleBench,
    PromptTimer,
    case_of_length,
    example_cases,
    key_of,
)
from choreo_bench.experiments.bench_pml.report import ModuleReport
from choreo_bench.experiments.eval_pml.measure import (
    ADAPTED,
    BASELINE,
    CACHED,
    Exam,
    FromAdaptedModules,
    FromModules,
    FromPlainText,
    ways,
)
from choreo_bench.experiments.eval_pml.report import ALL, DocumentReport
from choreo_bench.experiments.eval_pml.tasks import DOCUMENT_TASKS, DocumentQuestion
from choreo_bench.language import Problem, draw_problem
from support.tiny import save_tiny_llama

from choreo_agents import Engine, Memory, SchemaLibrary
from choreo_agents.engine.adapters import BASE
from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.training.journal import Journal

EXAMPLES = Path(__file__).parents[3] / "examples" / "pml"


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choreo_bench.timing.REST_S", 0.0)


def run(*arguments: str, code: int = 0) -> str:
    result = choreo(*arguments, code=code, columns=250)
    return result.stdout if "--json" in arguments else result.output


def problem(task: str, number: int = 0) -> Problem:
    return draw_problem(DOCUMENT_TASKS[task], "test", number)


# Accuracy: the same tokens, in the same places, with documents that see each other or do not.


@pytest.mark.parametrize("task", DOCUMENT_TASKS)
def test_a_problem_is_the_same_tokens_as_a_prompt_of_modules_and_as_text(tiny: LoadedModel, task: str) -> None:
    asked = DocumentQuestion.of(problem(task), "s")
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 23)) as engine, SchemaLibrary(engine) as library:
        library.register(asked.schema)
        with library.assemble(asked.prompt) as view, library.assemble(asked.documents) as bare:
            tokens = [token for handle in view.handles for token in engine.tokens(handle)]
            assert len(bare.handles) == 1 + len(asked.parts.branches) >= 3 and not bare.fresh_tokens
            assert view.offsets == [sum(h.length for h in view.handles[:i]) for i in range(len(view.handles))]
            # No document has attended to another.
            for handle in bare.handles[1:]:
                assert set(engine.inspect.ancestors(handle)) == {bare.handles[0]}
    assert tokens == tiny.encode(asked.as_text(tiny.chat))
    assert view.fresh_tokens == len(tiny.encode(asked.as_text(tiny.chat))) - bare.cached_tokens


def test_there_are_enough_kinds_of_questions() -> None:
    assert len(DOCUMENT_TASKS) == 14
    assert problem("unknown").gold == "I do not know." != problem("one_fact").gold


async def test_a_scaffold_is_an_ordinary_prompt_and_no_adapter_changes_nothing(embedded: LoadedModel) -> None:
    whole = problem("two_hops")
    asked = DocumentQuestion.of(whole, "s")
    name = asked.parts.answer.name
    with Engine.load(embedded, method="naive", memory=Memory(kv_budget_bytes=1 << 23)) as twin:
        text = await FromPlainText(twin).answer(asked)
        assert twin.stats().leases == 0
    with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 23)) as engine, SchemaLibrary(engine) as library:
        cached = await FromModules(library).answer(asked)
        adapted = await FromAdaptedModules(library, BASE).answer(asked)
        assert engine.stats().leases == 0 and library.schemas == ()
        together = DocumentQuestion.of(whole, "together")
        names = tuple(f"document-{n}" for n in range(1, len(asked.parts.branches) + 1))
        schema = replace(together.schema, tree=replace(together.schema.tree, scaffolds=(names,)))
        prompt = schema.prompt(f"<document-1/><document-2/><user>{asked.parts.asks[0].text}</user>")
        scaffolded = await FromModules(library).answer(DocumentQuestion(asked.parts, schema, prompt, prompt))
    assert cached == adapted and whole.score({name: text["answer"]}) == 1
    assert scaffolded["answer"] == text["answer"]
    assert text["cached_tokens"] == 0 < cached["cached_tokens"]
    assert text["fresh_tokens"] == cached["cached_tokens"] + cached["fresh_tokens"]


async def test_the_adapters_mapper_shows_the_documents(embedded: LoadedModel, tmp_path: Path) -> None:
    adapter = embedded.adapter
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mapper = CacheMapper(adapter.geometry, adapter.kinds)
        for parameter in mapper.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    mapper.save(tmp_path / "own", adapter.weights)
    asked = DocumentQuestion.of(problem("reports"), "s")
    with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 25)) as engine, SchemaLibrary(engine) as library:
        name = engine.load_adapter(tmp_path / "own")
        plain = await FromModules(library).answer(asked)
        mapped = await FromAdaptedModules(library, name).answer(asked)
        documents = sum(len(embedded.encode(embedded.chat.turn(b.words.role, b.words.text, b.words.author)))
                        for b in asked.parts.branches)  # fmt: skip
        assert engine.stats().tokens_mapped == documents and engine.stats().leases == 0
        # Problems that are asked at the same time may have the same documents.
        twins = [DocumentQuestion.of(problem("reports"), schema) for schema in ("s", "t", "u")]
        together = await asyncio.gather(*(FromAdaptedModules(library, name).answer(twin) for twin in twins))
        assert together == [mapped] * 3 and engine.stats().leases == 0
    assert mapped["answer"] != plain["answer"]


def test_what_was_answered_is_not_asked_again(embedded: LoadedModel, tmp_path: Path, monkeypatch: Any) -> None:
    exam = Exam(embedded, [DOCUMENT_TASKS["trust"]], 2)
    [_, cached] = ways(None)
    with Journal(tmp_path / "a.jsonl", exam.settings()) as journal:
        first = exam.take(cached, journal)
    with Journal(tmp_path / "a.jsonl", exam.settings()) as journal:
        told = list[int]()
        more = Exam(embedded, [DOCUMENT_TASKS["trust"]], 3).take(cached, journal, lambda: told.append(1))
        assert len(told) == 3 and more["trust"][:2] == first["trust"] and len(journal.records) == 3
        monkeypatch.setattr("choreo_bench.experiments.eval_pml.measure._answering", None)
        assert exam.take(cached, journal) == first


def test_differences_are_of_pairs() -> None:
    def records(*scores: float) -> list[dict[str, Any]]:
        return [{"score": score, "cached_tokens": 90, "fresh_tokens": 10} for score in scores]

    report = DocumentReport(
        {
            BASELINE: {"vote": records(1, 1, 1, 0.5), "assembly": records(1, 0, 0, 0)},
            CACHED: {"vote": records(1, 0, 0, 0.5), "assembly": records(1, 1, 0, 0)},
        }
    )
    assert report.gap(CACHED, "vote").points == -50 and report.gap(CACHED, "assembly").points == 25
    whole = report.gap(CACHED, ALL)
    assert whole.points == -12.5 and whole.interval is not None and whole.interval[0] < -12.5 < whole.interval[1]
    assert report.cached_share("vote") == (100, 0.9)
    assert report.as_object()["vote"]["right"] == {BASELINE: 0.875, CACHED: 0.375}
    page = report.report("f" * 64).as_markdown("choreo")
    assert "| assembly* | 100 | 90 | 25.0 (5-70) | 50.0 (15-85) | +25.0" in page and "| **all** |" in page


def test_the_accuracy_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, page = tmp_path / "answers.jsonl", tmp_path / "page.md"
    command = ["eval", "pml", "--n", "2", "--task", "best", "--task", "sum", "--out", str(out)]
    shown = run(*command, "--report", str(page))
    assert "best" in shown and "all" in shown and "difference" in shown
    assert page.read_text().startswith("`choreo eval pml --n 2 --task best --task sum ")
    assert page.read_text().count("\n| ") == 1 + 2 + 1
    monkeypatch.setattr("choreo_bench.experiments.eval_pml.measure._answering", None)
    found = json.loads(run(*command, "--json"))
    assert set(found) == {"best", "sum", "all"} and found["all"]["n"] == 4
    assert found["best"]["solved"][BASELINE] == 1.0 and list(found["sum"]["difference"]) == [CACHED]
    assert "unknown task 'bets'" in run("eval", "pml", "--task", "bets", code=1)
    assert "is not an adapter's folder" in run("eval", "pml", "--adapter", str(tmp_path / "none"), code=1)


def test_an_adapter_is_a_column_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_text("1")
    [_, _, first] = ways(tmp_path / "a")
    (tmp_path / "a" / "weights").write_text("2")
    [*_, other] = ways(tmp_path / "a")
    assert first.name == other.name == ADAPTED and first.key("sum", 1) != other.key("sum", 1)


# Speed.


@pytest.fixture
def bench(tiny: LoadedModel, tiny_path: Path) -> ModuleBench:
    return ModuleBench(tiny, tiny_path, torch.float32, repeats=2)


def test_prompts_have_as_many_tokens_as_were_asked_for(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choreo_bench.experiments.bench_pml.measure.MODULE_TOKENS", 16)
    case = case_of_length(tiny, 40, 9)
    assert case.sizes(tiny) == (40, 9) and len(case.prompt.imports) == 3
    assert case.schema == case_of_length(tiny, 40, 9).schema != case_of_length(tiny, 41, 9).schema
    with pytest.raises(ValueError, match="leave no space"):
        case_of_length(tiny, 40, 3)


def test_each_way_encodes_what_it_says(bench: ModuleBench, tiny: LoadedModel) -> None:
    case, journal, told = case_of_length(tiny, 40, 9), Journal(None, {}), list[str]()
    records = bench.measure(case, journal, lambda _, way: told.append(way))
    assert len(told) == 3 * 6 and list(journal.records.values()) == records
    counts = {r["way"]: (r["encoded"], r["reused"]) for r in journal.records.values()}
    assert counts == {
        "text": (49, 0), "HF generate": (49, 0), "disk": (9, 40), "host": (9, 40), "device": (9, 40),
        "host copy": (0, 40),
    }  # fmt: skip
    assert all(record["seconds"] > 0 for record in journal.records.values())


def test_modules_are_read_from_where_they_are_said_to_be(tiny: LoadedModel) -> None:
    case = case_of_length(tiny, 40, 9)
    with PromptTimer(tiny, case.schema, case.prompt) as timer:
        engine = timer.engine
        for source, filed, copied in (("device", 0, 0), ("disk", 40, 0), ("host", 0, 40)):
            library = timer.filed if filed else timer.library
            library.load(case.schema.name)
            before = library.engine.stats()
            timer.run(source)  # type: ignore[arg-type]
            after = library.engine.stats()
            # The answer's one token and the end of its turn are encoded, too, for whoever reads it later.
            assert after.tokens_encoded - before.tokens_encoded == 9 + 2, source
            from_disk = after.restored_from_disk - before.restored_from_disk
            found = (from_disk, after.restored_from_host - before.restored_from_host)
            assert (bool(found[0]), bool(found[1])) == (bool(filed), bool(copied)), source
        timer.library.load(case.schema.name)
        before = engine.stats().restored_from_host
        timer.run("host copy")
        modules = timer.library.modules(case.schema.name)
        assert {module.place for module in modules} == {"device"}
        assert engine.stats().restored_from_host - before == len(modules) == 2


def test_what_is_dear_is_encoded_once(bench: ModuleBench, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of_length(tiny, 40, 9)
    monkeypatch.setattr("choreo_bench.experiments.bench_pml.measure.DEAR_TOKENS", 48)
    runs = bench.runs(case)
    assert [runs.count((way, 1)) for way in bench.ways] == [1] * 6
    assert [way for way, number in runs if number != 1] == ["disk", "host", "device", "host copy"] * 2


def test_a_killed_run_goes_on_where_it_stopped(bench: ModuleBench, tiny: LoadedModel, tmp_path: Path) -> None:
    case, path = case_of_length(tiny, 40, 9), tmp_path / "runs.jsonl"

    class KilledError(Exception):
        pass

    def killed(_: str, way: str) -> None:
        if way == "disk" and len(journal.records) > 2:
            raise KilledError

    with Journal(path, {}) as journal, pytest.raises(KilledError):
        bench.measure(case, journal, killed)
    assert list(journal.records) == [key_of(case, way, 1) for way in ("text", "HF generate", "disk")]
    known = path.read_bytes()
    with Journal(path, {}) as journal:
        assert len(bench.measure(case, journal)) == len(journal.records) == 2 * 6
        assert path.read_bytes().startswith(known)


def record(length: int, way: str, seconds: float) -> dict[str, Any]:
    return {"case": f"{length:,} tokens", "length": length, "way": way, "seconds": seconds, "encoded": 1, "reused": 2}


def test_bars_are_met_missed_or_not_measured() -> None:
    settings = {"model": "m", "dtype": "fp32", "device": "cpu", "threads": 1, "made_by": "torch"}
    runs = [record(5120, "text", 50.0), record(5120, "text", 60.0), record(5120, "HF generate", 44.0)]
    runs += [record(5120, "device", each) for each in (2.0, 2.2)]
    runs += [record(5120, "host", each) for each in (2.5, 2.5)]
    runs += [record(5120, "host copy", each) for each in (0.5, 0.25)]
    report = ModuleReport(settings, runs)
    ratio = report.ratio("5,120 tokens", "text", "device")
    assert ratio is not None and (ratio.least, round(ratio.most, 2)) == (25.0, 27.27)
    found = report.report()
    assert found.lines == [
        # The faster full encoding counts.
        "met: everything encoded / on the device, 5,120 cached tokens, at least 20.0x: 21.0x (20.0x to 22.0x)",
        "not measured: everything encoded / on the device, 16,384 cached tokens, at least 60.0x",
        "missed: host copy / first token from host memory, 5,120 cached, at most 10.0%: 15.0% (10.0% to 20.0%)",
    ]
    assert [row[-1] for row in found.tables[0].rows][-2:] == ["26.1x (25.0x to 27.3x)", ""]
    assert [bar["met"] for bar in found.object["bars"]] == [True, None, False]


def test_the_speed_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, page, plot = tmp_path / "runs.jsonl", tmp_path / "page.md", tmp_path / "plot.png"
    command = ["bench", "pml", "--model", "embedded", "--dtype", "fp32", "--quick", "--lengths", "16,32,48"]
    command += ["--new", "8", "--schemas", str(EXAMPLES), "--out", str(out)]
    shown = run(*command, "--report", str(page), "--plot", str(plot))
    assert "48 tokens" in shown and "trip-plan" in shown and "not measured: everything encoded" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = page.read_text().splitlines()
    assert lines[0].startswith("`choreo bench pml --model embedded --dtype fp32 --quick --lengths 16,32,48 --new 8 ")
    assert [line.rpartition(": ")[2] for line in lines if line.startswith("## ")] == [
        "by cached tokens",
        "by example schema",
    ]
    assert sum(line.startswith("| 16 tokens |") for line in lines) == 6
    monkeypatch.setattr(PromptTimer, "run", None)
    found = json.loads(run(*command, "--json"))
    assert len(found["runs"]) == 6 * (3 + len(example_cases(EXAMPLES))) and len(found["bars"]) == 2 + 3


def test_examples_that_do_not_fit_are_left_out_by_name(tmp_path: Path) -> None:
    command = ["bench", "pml", "--model", "embedded", "--dtype", "fp32", "--quick", "--lengths", "16", "--new", "8"]
    shown = run(*command, "--no-hugging-face", "--schemas", str(EXAMPLES / "large"))
    assert "code-generation is left out: " in shown and "takes 3158 positions, but the model's context is 2048" in shown
    assert "trip-plan" in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lengths", "64,none"], "lengths must be numbers of 1 or more"),
        (["--lengths", "99999"], "use shorter --lengths"),
        (["--lengths", "1"], "leave no space for text"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str) -> None:
    monkeypatch.setattr(ModuleBench, "measure", None)
    assert reason in run("bench", "pml", "--model", "embedded", *arguments, code=1)


def test_memory_is_measured_for_every_model(tmp_path: Path) -> None:
    tiny = save_tiny_llama(tmp_path / "tiny")
    rows = json.loads(run("pml", "memory", "--model", str(tiny), "--json"))
    assert rows["embedded"]["device"] == 2048 and rows[str(tiny)]["device"] == 2 * 3 * 2 * 16 * 4
    for row in rows.values():
        assert row["host"] == row["device"] < row["disk"] < 1.02 * row["device"]
    assert "524,288" in run("pml", "memory")
