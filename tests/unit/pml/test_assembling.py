"""Where a prompt's imports, arguments and own text stand (Prompt Cache, section 3.4)."""

from __future__ import annotations

import pytest
from support.pml import WordModel

from choreo_agents.errors import InvalidRequestError
from choreo_agents.pml import Assembly, Schema, compile_prompt, compile_schema

SCHEMA = """<schema name="s" scaffold="a c">
  start
  <module name="a">a1 <parameter name="p" length="3"/> a2 <module name="in">i1 i2 i3</module> a3</module>
  <union><module name="short">s</module><module name="long">l1 l2 l3 l4</module></union>
  <module name="b" cache="false" confidential="true">b1 <parameter name="q" length="2"/> b2</module>
  <module name="c">c1</module> end
</schema>"""
# start  a1  p p p  a2  i1 i2 i3  a3  short/long  b1  q q  b2  c1  end
# 0-1    2   3-5    6   7-9       10  11-14       15  16   18  19  20       (0 is the conversation's start)


def assembled(pml: str, schema: str = SCHEMA) -> tuple[Assembly, list[tuple[int, str, str]]]:
    model = WordModel()
    read = Schema.from_text(schema)
    assembly = compile_prompt(compile_schema(read, model.loaded()), read.prompt(pml), model.loaded())
    return assembly, [(text.offset, model.decode(text.tokens), text.kind) for text in assembly.fresh]


def keys(assembly: Assembly) -> list[tuple[str, int]]:
    return [(piece.key, piece.start) for piece in assembly.cached]


def test_a_prompt_of_nothing_is_the_schemas_own_text() -> None:
    assembly, fresh = assembled("")
    assert keys(assembly) == [("#0", 0), ("#1", 20)]
    assert fresh == []
    assert (assembly.end, assembly.cached_tokens, assembly.fresh_tokens) == (21, 3, 0)


def test_an_argument_replaces_its_slot_and_a_missing_one_leaves_it() -> None:
    assembly, fresh = assembled("<a p='x'/>")
    assert keys(assembly) == [("#0", 0), ("a#0", 2), ("a#2", 6), ("a#3", 10), ("#1", 20)]
    assert fresh == [(3, " x", "argument")]
    assembly, fresh = assembled("<a/>")
    assert ("a#1", 3) in keys(assembly)
    assert fresh == []
    assembly, fresh = assembled("<a p=''/>")
    assert ("a#1", 3) not in keys(assembly)
    assert fresh == []


def test_modules_that_are_not_cached_are_fresh() -> None:
    assembly, fresh = assembled("<b q='x y'/>")
    assert keys(assembly) == [("#0", 0), ("#1", 20)]
    assert fresh == [(15, " b1", "module"), (16, " x y", "argument"), (18, " b2", "module")]
    assert all(text.confidential and text.module == ("b",) for text in assembly.fresh)
    assert [text[:2] for text in assembled("<b/>")[1]] == [(15, " b1"), (18, " b2")]
    held = SCHEMA.replace('name="q" length="2"', 'name="q" length="2" scaffold="z"')
    assert [text[:2] for text in assembled("<b/>", held)[1]] == [(15, " b1"), (16, " z"), (18, " b2")]
    assert assembled("<b q='x y'/>", held)[1] == fresh


@pytest.mark.parametrize(
    ("pml", "expected"),
    [
        ("<short/> one two <c/>", [(12, " one two")]),  # in the gap that the union and b leave
        ("<a/> one<c/>", [(11, " one")]),
        ("<short/> one two three four five six seven eight<c/>", [(21, " one two three four five six seven eight")]),
        ("<long/> x <b/>", [(15, " b1"), (18, " b2"), (21, " x")]),  # no gap between them
        ("one <long/>", [(2, "one")]),  # after the start, where a would be
        ("one two <a/>", [(21, "one two")]),  # a comes right after the start
        ("<c/> one", [(21, " one")]),
        ("<user>one</user><c/>", [(21, "<|user|> one<|end|>")]),
        ("<short/> one<user>ask</user> two<c/>", [(12, " one"), (13, "two"), (21, "<|user|> ask<|end|>")]),
        ("<a><in/> one</a><c/>", [(21, " one")]),  # a3 follows right after
        ("<a> one two </a><long/>", [(21, " one two")]),
        ("<a> one two <in/></a>", [(21, " one two")]),
        ("<c/> one<a/> two", [(21, " two")]),
    ],
)
def test_free_text_stands_in_the_gap_after_what_it_follows_or_at_the_end(
    pml: str, expected: list[tuple[int, str]]
) -> None:
    assembly, fresh = assembled(pml)
    if pml.startswith("<c/> one<a"):
        expected = [(21, " one"), (22, " two")]
    assert [text[:2] for text in fresh] == expected
    assert assembly.end == max(21, *(text.offset + len(text.tokens) for text in assembly.fresh))


def test_text_stands_in_the_gap_of_a_nested_import_that_is_left_out() -> None:
    inside = "<module name='a'>x <module name='i'>i i i</module><module name='j'>j</module></module>"
    schema = f"<schema name='s'>{inside}</schema>"
    assert assembled("<a> one two <j/></a>", schema)[1] == [(2, " one two", "text")]


@pytest.mark.parametrize(
    ("pml", "schema", "at"),
    [
        ("<short/> one two three four five six seven<c/>", SCHEMA, 12),
        (
            "<a> one two three<j/></a>",
            "<schema name='s'><module name='a'>x<module name='i'> i i i</module><module name='j'>j</module></module>"
            "</schema>",
            2,
        ),
    ],
    ids=["behind an import", "in place of one"],
)
def test_attack_text_that_exactly_fits_its_gap_stands_in_it(pml: str, schema: str, at: int) -> None:
    assembly, [(start, words, _)] = assembled(pml, schema)
    whole = len(words.split())
    assert start == at and at + whole in [offset for _, offset in keys(assembly)], "up to what comes next"
    longer, [(behind, _, _)] = assembled(pml.replace(" one", " one one"), schema)
    assert behind == assembly.end and longer.end == assembly.end + whole + 1, "one word more is one too many"


def test_a_scaffold_is_used_when_a_prompt_imports_all_of_it() -> None:
    assert "c#0 [a c]" in dict(keys(assembled("<c/><a/>")[0]))
    assert "c#0" in dict(keys(assembled("<c/><short/>")[0]))


def test_the_largest_scaffold_is_used_and_each_module_in_one_only() -> None:
    inside = "".join(f"<module name='{name}'>{name}</module>" for name in "abcd")
    schema = f"<schema name='s' scaffold='a b; a b c; c d'>{inside}</schema>"
    found = dict(keys(assembled("<a/><b/><c/><d/>", schema)[0]))
    assert list(found) == ["#0", "a#0", "b#0 [a b c]", "c#0 [a b c]", "d#0"]
    assert list(dict(keys(assembled("<a/><b/><d/>", schema)[0]))) == ["#0", "a#0", "b#0 [a b]", "d#0"]


def test_parameters_of_the_schema_itself() -> None:
    schema = "<schema name='s'>Hi <parameter name='who' length='2'/>!</schema>"
    assembly, fresh = assembled("<prompt schema='s' who='Ann'/>", schema)
    assert fresh == [(2, " Ann", "argument")]
    assert keys(assembly) == [("#0", 0), ("#2", 4)]


def test_a_prompt_of_another_schema_is_refused() -> None:
    model = WordModel().loaded()
    one, other = (Schema.from_text(f"<schema name='s'>{text}</schema>") for text in "ab")
    with pytest.raises(InvalidRequestError, match="of another version of schema 's'"):
        compile_prompt(compile_schema(one, model), other.prompt(""), model)
