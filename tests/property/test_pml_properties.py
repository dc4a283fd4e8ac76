"""The markup language on random input: round trips, positions and parents against slow oracles, and a fuzzed parser."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.pml import (
    WordModel,
    all_choices,
    imports,
    mutated,
    other_words,
    pml_of,
    rows_of_modules,
    schemas,
    texts,
    words,
    written,
)

from choreo_agents.errors import PMLError, PMLProblem
from choreo_agents.pml import Assembly, CompiledSchema, Schema, compile_prompt, compile_schema
from choreo_agents.pml.markup.parser import check_schema
from choreo_agents.pml.markup.problems import Problems
from choreo_agents.pml.markup.syntax import modules_of

FUZZ_SECONDS = float(os.environ.get("PML_FUZZ_SECONDS", "0"))
FUZZ_DOCUMENTS = 400
SEEDS = (
    """<?xml version="1.0"?><schema name="s" scaffold="a b; a e">
    <system>You <![CDATA[<see>]]></system>
    <user><module name="a">One <parameter name="p" length="3"/> two</module>
    <union><module name="b" cache="true">x &amp; y</module>
    <module name="c" cache="false">z<module name="d"/></module></union></user>
    <module name="e" confidential="true" xml:space="preserve"> kept\n  so </module></schema>""",
    """<prompt schema="s">before <a p="1 2"/> between <!-- no --> <c><d/> inside</c> after <user>ask</user></prompt>""",
    """<a p="&lt;"/> text <b/><e/>""",
    """<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><schema name="s">&b;</schema>""",
)


@given(schemas(texts | words))
def test_what_is_written_is_read_again(schema: Schema) -> None:
    again = Schema.from_text(pml_of(schema.tree))
    assert again == schema


@given(schemas(words))
def test_every_piece_starts_where_the_longest_choice_before_it_ends(schema: Schema) -> None:
    model = WordModel()
    choices = list(all_choices(schema.tree)) if pml_of(schema.tree).count("<union>") <= 6 else []
    assume(0 < len(choices) <= 300)
    starts: dict[tuple[tuple[str, ...], int], int] = {}
    length = 0
    for chosen in choices:
        at = 0
        count: dict[tuple[str, ...], int] = {}
        for path, _, tokens in written(schema.tree, model, chosen):
            number = count[path] = count.get(path, -1) + 1
            starts[path, number] = max(starts.get((path, number), 0), at)
            at += tokens
        length = max(length, at)
    compiled = compile_schema(schema, model.loaded())
    found = {(piece.module, int(key.rpartition("#")[2])): piece.start for key, piece in compiled.pieces.items()}
    assert found == starts
    assert compiled.layout.length == length


@given(schemas(words))
def test_a_piece_attends_to_what_its_ancestors_say_before_it(schema: Schema) -> None:
    compiled = compile_schema(schema, WordModel().loaded())
    pieces = sorted(compiled.pieces.values(), key=lambda piece: piece.start)
    for piece in pieces:
        above = [each for each in pieces if each.module == piece.module[: len(each.module)] and each is not piece]
        assert piece.parents == tuple(each.key for each in above if each.start + len(each.tokens) <= piece.start)


@given(schemas(words), st.data())
def test_other_words_in_a_module_change_no_piece_of_its_neighbours(schema: Schema, data: st.DataObject) -> None:
    modules = list(modules_of(schema.tree))
    assume(modules)
    path, _ = data.draw(st.sampled_from(modules))
    model = WordModel()
    before = compile_schema(schema, model.loaded())
    after = compile_schema(Schema(other_words(schema.tree, path)), model.loaded())
    assert list(after.pieces) == list(before.pieces)
    for key, piece in before.pieces.items():
        if piece.module[: len(path)] == path:
            assert replace(after.pieces[key], tokens=piece.tokens) == piece
        else:
            assert after.pieces[key] == piece


@given(rows_of_modules(words), st.data())
def test_members_of_a_scaffold_see_besides_what_those_before_them_say(schema: Schema, data: st.DataObject) -> None:
    paths = [path for path, _ in modules_of(schema.tree)]
    pairs = [each for each in combinations(paths, 2) if not scaffold_problems(schema, each)]
    pair = data.draw(st.sampled_from(pairs))
    sets = [pair, *((*pair, each) for each in paths if not scaffold_problems(schema, (*pair, each)))]
    chosen = data.draw(st.permutations(data.draw(st.sampled_from(sets))))
    compiled = compile_schema(with_scaffold(schema, chosen), WordModel().loaded())
    members = sorted(chosen, key=paths.index)
    [scaffold] = compiled.scaffolds
    assert list(scaffold) == members
    own = {path: [*compiled.keys[path, scaffold]] for path in paths if (path, scaffold) in compiled.keys}
    assert set(own) == {path for path in paths if any(path[: len(member)] == member for member in members)}
    for number, member in enumerate(members):
        before = [key for earlier in members[:number] for key in own[earlier]]
        for path in (path for path in own if path[: len(member)] == member):
            for plain, key in zip(compiled.keys[path, None], own[path], strict=True):
                theirs = {compiled.pieces[each].key.partition(" ")[0] for each in compiled.pieces[key].parents}
                assert theirs == {*compiled.pieces[plain].parents, *(each.partition(" ")[0] for each in before)}
                inside = [each for each in compiled.pieces[key].parents if compiled.pieces[each].module in own]
                assert all(each in own[compiled.pieces[each].module] for each in inside)
                found = [compiled.pieces[each].start for each in compiled.pieces[key].parents]
                assert found == sorted(found)
                assert compiled.pieces[key].start == compiled.pieces[plain].start


def with_scaffold(schema: Schema, paths: Sequence[tuple[str, ...]]) -> Schema:
    return Schema(replace(schema.tree, scaffolds=(tuple("/".join(path) for path in paths),)))


def scaffold_problems(schema: Schema, paths: Sequence[tuple[str, ...]]) -> list[PMLProblem]:
    problems = Problems()
    check_schema(with_scaffold(schema, paths).tree, problems)
    return problems.found


@given(schemas(words), st.data())
def test_a_prompt_uses_each_position_once_and_loses_no_text(schema: Schema, data: st.DataObject) -> None:
    model = WordModel()
    compiled = compile_schema(schema, model.loaded())
    pml = data.draw(imports(schema.tree, st.sampled_from(["", "x", "x y"])))
    try:
        prompt = schema.prompt(pml)
        assembly = compile_prompt(compiled, prompt, model.loaded())
    except PMLError as error:
        assert all("argument" in each.message for each in error.problems), error
        return
    assert_sound(compiled, assembly)
    spoken = "".join(model.decode(text.tokens) for text in assembly.fresh if text.kind == "text")
    for said in ("free text", "words", "<|user|> asked<|end|>"):
        assert spoken.count(said) == pml.count("<user>asked" if "asked" in said else said)


def assert_sound(compiled: CompiledSchema, assembly: Assembly) -> None:
    spans = [(piece.start, piece.start + len(compiled.pieces[piece.key].tokens)) for piece in assembly.cached]
    spans += [(text.offset, text.offset + len(text.tokens)) for text in assembly.fresh]
    used = set(assembly.prompt.arguments)
    filled = {
        piece.key
        for piece in compiled.pieces.values()
        if piece.slot is not None and piece.slot.name in assembly.prompt.arguments.get(piece.module, {})
    }
    keys = {piece.key for piece in assembly.cached}
    assert keys == {p.key for p in compiled.pieces.values() if p.cached and p.module in used} - filled
    positions = [position for start, end in spans for position in range(start, end)]
    assert len(positions) == len(set(positions)) == assembly.cached_tokens + assembly.fresh_tokens
    assert max(positions, default=-1) < assembly.end
    assert [text.offset for text in assembly.fresh] == sorted(text.offset for text in assembly.fresh)


@given(st.text(max_size=60) | st.sampled_from(SEEDS).flatmap(lambda seed: st.text().map(lambda text: seed + text)))
def test_random_text_gives_nothing_but_pml_errors(text: str) -> None:
    require_pml_errors_only(text)


@pytest.mark.timeout(int(FUZZ_SECONDS) + 180)
def test_fuzz() -> None:
    """`PML_FUZZ_SECONDS=300 pytest tests/property/test_pml_properties.py -k fuzz -s` goes on for that long."""
    seed = int(os.environ.get("PML_FUZZ_SEED", random.randrange(2**32) if FUZZ_SECONDS else 0))
    rng = random.Random(seed)
    ends = time.monotonic() + FUZZ_SECONDS
    tried = read = 0
    while tried < FUZZ_DOCUMENTS or time.monotonic() < ends:
        text = mutated(rng, rng.choice(SEEDS))
        try:
            read += require_pml_errors_only(text)
        except BaseException:
            sys.stdout.write(f"\nPML_FUZZ_SEED={seed}, document {tried}: {text!r}\n")
            raise
        tried += 1
    sys.stdout.write(f"\nPML_FUZZ_SEED={seed}: {tried} documents, {read} of them without a problem\n")
    assert 0 < read < tried


def require_pml_errors_only(text: str) -> bool:
    """Whether a text is a schema or prompt; any error that is no `PMLError` with good places is raised."""
    good = Schema.from_text(SEEDS[0])
    fine = False
    for read in (Schema.from_text, good.prompt):
        try:
            made = read(text)
        except PMLError as error:
            lines = text.encode(errors="replace").decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
            for problem in error.problems:
                assert 1 <= problem.line <= len(lines)
                assert 1 <= problem.column <= len(lines[problem.line - 1]) + 1
        else:
            fine = True
            model = WordModel(context=200).loaded()
            try:
                if isinstance(made, Schema):
                    assert Schema.from_text(pml_of(made.tree)) == made
                    compile_schema(made, model)
                else:
                    compile_prompt(compile_schema(good, model), made, model)
            except PMLError:
                pass
    return fine
