"""Whatever is wrong is told at once, by line and column, with what was expected."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support.pml import WordModel

from choreo_agents.errors import PMLError
from choreo_agents.pml import Schema, compile_prompt, compile_schema
from choreo_agents.pml.markup.reading import MOST_NESTED

SCHEMA = Schema.from_text(
    """<schema name="travel"><module name="plan"><parameter name="days" length="3"/>
    <union><module name="miami">M</module><module name="paris">P</module></union></module>
    <module name="tips">T</module></schema>"""
)
Found = list[tuple[int, int, str, str]]


def schema_problems(text: str, **options: Path) -> Found:
    with pytest.raises(PMLError) as caught:
        Schema.from_text(text, **options)
    return [(each.line, each.column, each.message, each.expected) for each in caught.value.problems]


def prompt_problems(text: str) -> Found:
    with pytest.raises(PMLError) as caught:
        SCHEMA.prompt(text)
    return [(each.line, each.column, each.message, each.expected) for each in caught.value.problems]


def one(found: Found, line: int, column: int, *said: str) -> None:
    """There is one problem, there, which says these things."""
    assert len(found) == 1, found
    assert found[0][:2] == (line, column)
    for each in said:
        assert each in f"{found[0][2]}; expected {found[0][3]}"


IN_SCHEMAS = [
    ("<modul name='a'/>", 1, 18, "there is no <modul>", "'module'"),
    ("\n  <b>bold</b>", 2, 3, "there is no <b>", "&lt;b"),
    ("<module nme='a' name='b'/>", 1, 26, "no attribute 'nme'", "'name'"),
    ("<module>x</module>", 1, 18, "<module> has no name", 'name="..."'),
    ("<module name='a'/>\n<module name='a'/>", 2, 1, "another module 'a' at line 1", "once"),
    ("<module name='a'/><union><module name='a'/></union>", 1, 43, "another module 'a'", "once"),
    ("<module name='user'/>", 1, 18, "named 'user'", "another name"),
    ("<module name='a b'/>", 1, 18, "'a b' is not a valid name of a module", "letters"),
    ("<module name='xml-x'/>", 1, 18, "not a valid name", "not 'xml' first"),
    ("<module name=''/>", 1, 26, "the name of the <module> is empty", 'name="..."'),
    ("<module name='a' cache='no'/>", 1, 35, "cache is 'no'", "'true' or 'false'"),
    ("<module name='a' confidential='1'/>", 1, 35, "confidential is '1'", "'true' or 'false'"),
    ("<module name='a' xml:space='x'>b</module>", 1, 35, "xml:space is 'x'", "'preserve' or 'default'"),
    ("<union scaffold='tain'><module name='train'/></union>", 1, 18, "<union> names 'tain'", "'train'"),
    ("<union scaffold='a'><module name='a' cache='false'/></union>", 1, 18, "'a', which is not cached", "no scaffold"),
    ("<parameter name='p'/>", 1, 18, "has no length", 'length="..."'),
    ("<parameter name='p' length='0'/>", 1, 38, "length of a parameter is '0'", "number of tokens"),
    ("<param name='p' len='two'/>", 1, 34, "len of a parameter is 'two'", "number of tokens"),
    ("<param name='p' len='٣'/>", 1, 34, "is '٣'", "number of tokens"),
    ("<param name='p' len='9999999999'/>", 1, 34, "len of a parameter", "999999999"),
    ("<param name='p' len='1' length='1'/>", 1, 34, "given twice", "length or len"),
    ("<param name='p' len='1'>x</param>", 1, 42, "a <param> has content", "nothing"),
    ("<param name='p' len='1'/>\n <param name='p' len='2'/>", 2, 2, "another parameter 'p'", "once"),
    ("<param name='schema' len='1'/>", 1, 18, "named 'schema'", "another name"),
    ("<union/>", 1, 18, "no members", "<module>"),
    ("<union>\n words<module name='a'/></union>", 2, 2, "text in a <union>", "<module> only"),
    ("<union><user/><module name='a'/></union>", 1, 25, "a <user> in a <union>", "<module> only"),
    ("<user><module name='a'>\n<system>x</system></module></user>", 2, 1, "a <system> in a <user>", "no other"),
    ("<module name='a' src='a.txt'/>", 1, 35, "only a schema file", "folder"),
    ("&nbsp;", 1, 18, "undefined entity", "&lt;"),
    ("a < b", 1, 21, "not well-formed", ""),
    ("<module name='a'>", 1, 37, "mismatched tag", "</module> for line 1"),
]


@pytest.mark.parametrize(("inside", "line", "column", "said", "expected"), IN_SCHEMAS)
def test_one_problem_of_a_schema(inside: str, line: int, column: int, said: str, expected: str) -> None:
    one(schema_problems(f'<schema name="s">{inside}</schema>'), line, column, said, expected)


IN_SCAFFOLDS = [
    ("a x", "names 'x', which is not a module", "'a' or 'a/c' or 'a/d' or 'b' or 'e'"),
    ("a bb", "names 'bb'", "'b'"),
    ("a", "too few", "two or more"),
    ("a a", "one twice", "two or more"),
    ("a b; b a", "declared twice", "once"),
    ("a a/c", "are nested", "contain"),
    ("a/c a/d", "members of one union", "together"),
    ("a e", "not cached", "cached"),
]


@pytest.mark.parametrize(("scaffold", "said", "expected"), IN_SCAFFOLDS)
def test_problems_of_scaffolds(scaffold: str, said: str, expected: str) -> None:
    inside = (
        "<module name='a'><union><module name='c'/><module name='d'/></union></module><module name='b'/>"
        "<module name='e' cache='false'/>"
    )
    found = schema_problems(f"<schema name='s'\n scaffold='{scaffold}'>{inside}</schema>")
    assert any(each[:2] == (2, 2) and said in each[2] and expected in each[3] for each in found), found


@pytest.mark.parametrize(
    ("text", "line", "column", "said"),
    [
        ("", 1, 1, "no element found"),
        ("words", 1, 1, "syntax error"),
        ("<prompt schema='s'/>", 1, 1, "the document is a <prompt>"),
        ("<schema name='s'/>\n<schema name='t'/>", 2, 1, "junk after document element"),
        ("<schema name='s'>\n\0</schema>", 2, 1, "'\\x00' is not allowed"),
        ("<schema name='s'>\ud800</schema>", 1, 18, "not allowed"),
        ("<schema name='s' name='t'/>", 1, 18, "duplicate attribute"),
    ],
)
def test_what_is_no_schema(text: str, line: int, column: int, said: str) -> None:
    one(schema_problems(text), line, column, said)


def test_a_name_is_required_of_schemas() -> None:
    one(schema_problems("<schema>x</schema>"), 1, 1, "<schema> has no name")


BOMB = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 12))


@pytest.mark.parametrize(
    "head",
    [
        f'<!DOCTYPE schema [<!ENTITY e0 "ha">{BOMB}]>',
        '<!DOCTYPE schema [<!ENTITY e11 SYSTEM "file:///etc/hostname">]>',
        '<!DOCTYPE schema [<!ENTITY % p SYSTEM "http://localhost/x"> %p;]>',
        '<!DOCTYPE schema SYSTEM "http://localhost/x.dtd">',
        "<!DOCTYPE schema>",
    ],
)
def test_document_types_and_entities_are_refused(head: str) -> None:
    [found] = schema_problems(f'{head}<schema name="s">&e11;</schema>')
    assert "refused" in found[2]
    [found] = prompt_problems(f'{head}<prompt schema="travel">&e11;</prompt>')
    assert "refused" in found[2]


def test_elements_that_are_nested_too_deeply() -> None:
    opened = "".join(f"<module name='m{n}'>" for n in range(100_000))
    [found] = schema_problems(f"<schema name='s'>{opened}")
    assert str(MOST_NESTED) in found[2]
    with pytest.raises(PMLError, match="nested"):
        SCHEMA.prompt("<plan>" * 100_000)


def test_src_reads_nothing_outside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "schema"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "schema-2").mkdir()
    (tmp_path / "schema-2" / "x.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "up").symlink_to(tmp_path)
    (folder / "latin.txt").write_bytes(b"ok\ncaf\xe9")
    (folder / "nul.txt").write_text("a\n\0")
    names = ["../secret.txt", "link.txt", "up/secret.txt", str(tmp_path / "secret.txt"), "../schema-2/x.txt"]
    for name in names:
        found = schema_problems(f'<schema name="s">\n <module name="m" src="{name}"/></schema>', folder=folder)
        one(found, 2, 19, "outside the schema's folder")
    for name, said in [("none.txt", "no file"), (".", "no file"), ("x" * 5000, "cannot be read")]:
        one(schema_problems(f'<schema name="s"><module name="m" src="{name}"/></schema>', folder=folder), 1, 35, said)
    one(
        schema_problems('<schema name="s"><user src="latin.txt"/></schema>', folder=folder),
        2,
        4,
        "0xe9 is not UTF-8",
    )
    one(schema_problems('<schema name="s"><user src="nul.txt"/></schema>', folder=folder), 2, 1, "not allowed")


def test_a_file_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "s.pml"
    path.write_bytes(b'<schema name="s">\ncaf\xe9</schema>')
    with pytest.raises(PMLError, match=r"s\.pml:2:4: the byte 0xe9") as caught:
        Schema.from_file(path)
    assert len(caught.value.problems) == 1


IN_PROMPTS = [
    ("<prompt schema='travle'/>", 1, 9, "names schema 'travle'", "travel"),
    ("<plam/>", 1, 1, "has no module 'plam'", "'plan'"),
    ("<tips/>\n <zzz/>", 2, 2, "has no module 'zzz'", "'plan' or 'tips'"),
    ("<plan dys='3'/>", 1, 7, "has no parameter 'dys'", "'days'"),
    ("<tips a='1'/>", 1, 7, "has no parameter 'a'", "no attribute"),
    ("<prompt schema='travel' a='1'/>", 1, 25, "has no parameter 'a'", "no attribute"),
    ("<plan><miami/><paris/></plan>", 1, 15, "members of one union", "one of them"),
    ("<miami/>", 1, 1, "is inside 'plan'", "<plan><miami/></plan>"),
    ("<plan><tips/></plan>", 1, 7, "in no other module", "<tips/>"),
    ("<tips/><tips/>", 1, 8, "imported twice", "one import"),
    ("<module name='a'/>", 1, 1, "a <module> in a prompt", "import"),
    ("<user>x<tips/></user>", 1, 8, "a <tips> in a turn", "text"),
    ("<user name='a'>x</user>", 1, 7, "<user> has no attribute 'name'", "no attribute"),
    ("x &foo;", 1, 3, "undefined entity", "&lt;"),
    ("one\ntwo <b", 2, 7, "not well-formed", ""),
    ("<schema name='s'/>", 1, 1, "the document is a <schema>", "<prompt>"),
]


@pytest.mark.parametrize(("text", "line", "column", "said", "expected"), IN_PROMPTS)
def test_one_problem_of_a_prompt(text: str, line: int, column: int, said: str, expected: str) -> None:
    one(prompt_problems(text), line, column, said, expected)


def test_all_problems_come_at_once_in_the_order_of_their_places() -> None:
    found = schema_problems(
        """<schema nam="s">
  <module name="a" cache="x"/>
  <module name="a"><parameter length="0"/></module>
  <union>words</union> &oops;
</schema>"""
    )
    places = [each[:2] for each in found]
    assert places == sorted(places)
    assert places == [(1, 1), (1, 9), (2, 20), (3, 3), (3, 20), (3, 31), (4, 3), (4, 10), (4, 24)]


def test_arguments_are_counted_in_tokens_and_prompts_in_positions() -> None:
    model = WordModel(context=6).loaded()
    compiled = compile_schema(SCHEMA, model)
    with pytest.raises(PMLError) as caught:
        compile_prompt(compiled, SCHEMA.prompt("<tips/>\n<plan days='a b c d'/> and more and more"), model)
    argument, whole = sorted(caught.value.problems, key=lambda each: -each.line)
    assert (argument.line, argument.column) == (2, 7)
    assert "'days' has 4 tokens" in argument.message
    assert argument.expected == "at most 3"
    assert "the model's context is 6" in whole.message


def test_a_schema_longer_than_the_context_is_refused_before_its_slots_are_filled() -> None:
    schema = Schema.from_text("<schema name='s'>a <parameter name='p' length='999999999'/></schema>")
    with pytest.raises(
        PMLError, match=r"<schema>:1:1: schema 's' takes 1000000001 positions.* is 100; expected at most"
    ):
        compile_schema(schema, WordModel(context=100).loaded())


def test_errors_can_be_pickled() -> None:
    with pytest.raises(PMLError) as caught:
        SCHEMA.prompt("<zzz/>")
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert str(again) == str(caught.value)
    assert isinstance(again, ValueError)
