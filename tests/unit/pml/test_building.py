"""Schemas that are written in Python, and how schemas are written as PML."""

from __future__ import annotations

from typing import Any

import pytest

from choreo_agents.errors import PMLError
from choreo_agents.pml import Schema, Slot, assistant, module, module_of, slot, system, union, user


@module
def trip(days: Slot = slot(5), city: Slot = slot(10)) -> str:
    return f"Plan a trip of {days} days to {city!r}."


@module(name="unit.py", cache=False, confidential=True)
def unit() -> list[Any]:
    return [" class Unit<T>:\n    pass\n", union(module_of("one", " 1"), module_of("two", " 2"))]


def test_functions_give_the_tree_that_reading_gives() -> None:
    built = Schema.from_python(
        "travel",
        [system("You plan & book."), user(trip, unit, " Now."), assistant("Yes.")],
        scaffolds=[["trip", "trip2"]][:0],
    )
    assert built == Schema.from_text(
        """<schema name="travel">
          <system>You plan &amp; book.</system>
          <user>
            <module name="trip">Plan a trip of <parameter name="days" length="5"/> days to
              <parameter name="city" length="10"/>.</module><module name="unit.py" cache="false" confidential="true">
              <![CDATA[class Unit<T>:
    pass
]]><union> <module name="one">1</module> <module name="two">2</module></union></module>
            Now.
          </user>
          <assistant>Yes.</assistant>
        </schema>"""
    )


def test_parameters_and_scaffolds_of_the_schema_itself() -> None:
    def content(name: Slot = slot(2, "<you>\n")) -> list[Any]:
        return [f"Hi {name}!", union(module_of("a", "x"), module_of("c", "z"), scaffold="c"), module_of("b", "y")]

    built = Schema.from_python("s", content, scaffolds=[("a", "b")])
    assert built == Schema.from_text(
        '<schema name="s" scaffold="a b">Hi <param name="name" len="2" scaffold="&lt;you>&#10;"/>!<union scaffold="c">'
        '<module name="a">x</module><module name="c">z</module></union><module name="b">y</module></schema>'
    )
    assert Schema.from_text(built.to_pml()) == built


def problems(*content: Any, **options: Any) -> list[str]:
    with pytest.raises(PMLError) as caught:
        Schema.from_python("s", list(content), **options)
    return [each.message for each in caught.value.problems]


def test_built_schemas_are_checked_as_those_that_are_read() -> None:
    found = problems(module_of("a"), module_of("a"), user(system("x")), union(), scaffolds=[["a", "q"]])
    assert [
        any(said in each for each in found) for said in ("another module", "a <system> in", "no members", "'q'")
    ] == [True] * 4
    assert "not allowed in XML" in problems("a\x0b")[0]
    assert "empty name" in problems(module_of("", "x"))[0]
    assert "is no part" in problems(3)[0]


def test_what_functions_may_not_do() -> None:
    @module
    def unused(p: Slot = slot(1)) -> str:
        return "x"

    @module
    def twice(p: Slot = slot(1)) -> str:
        return f"{p} {p}"

    @module
    def long(p: Slot = slot(0)) -> str:
        return f"{p}"

    slots: list[Slot] = []

    @module
    def lends(p: Slot = slot(1)) -> str:
        slots.append(p)
        return f"{p}"

    @module
    def borrows() -> str:
        return f"{slots[0]}"

    assert "stands in no text" in problems(unused)[0]
    assert "another parameter 'p'" in problems(twice)[0]
    assert "length 0" in problems(long)[0]
    assert "of another module" in problems(lends, borrows)[0]
    with pytest.raises(ValueError, match="no format"):
        module(lambda p=slot(1): f"{p:>5}")
    with pytest.raises(TypeError, match="has no slot"):
        module(lambda p: f"{p}")


def test_problems_name_the_functions_file_and_line() -> None:
    @module
    def unused(p: Slot = slot(1)) -> str:
        return "x"

    with pytest.raises(PMLError) as caught:
        Schema.from_python("s", [unused])
    assert caught.value.problems[0].file == "test_building.py"
    assert caught.value.problems[0].line > 100


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("a &lt; b &amp; c", "\n  a &lt; b &amp; c"),
        ("<![CDATA[a  b]]>", "\n  <![CDATA[a  b]]>"),
        ("<![CDATA[a]]>&#13;<![CDATA[ ]]]]><![CDATA[> ]]>", "\n  <![CDATA[a]]>&#13;<![CDATA[ ]]]]><![CDATA[> ]]>"),
        (
            "a <union><module name='m'>b</module><module name='n'>c</module></union> d",
            '\n  a\n  <union>\n    <module name="m">b</module>\n    <module name="n">c</module></union>\n  d',
        ),
        ("a<module name='m'>b</module>", '\n  a<module name="m">b</module>'),
        ("<user>a</user>", "\n  <user>\n    a\n  </user>\n"),
    ],
)
def test_lines_are_broken_where_that_changes_nothing(inside: str, expected: str) -> None:
    assert Schema.from_text(f'<schema name="s">{inside}</schema>').to_pml() == f'<schema name="s">{expected}</schema>\n'
