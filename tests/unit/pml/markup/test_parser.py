"""What schemas and prompts are read as, whitespace above all."""

from __future__ import annotations

from pathlib import Path

import pytest

from choreo_agents.pml import Schema
from choreo_agents.pml.markup.syntax import ChatTurn, Import, Module, Parameter, Text, Union


def children(inside: str) -> tuple[object, ...]:
    return Schema.from_text(f'<schema name="s">{inside}</schema>').tree.children


def said(inside: str) -> list[str]:
    """The texts of a schema's own modules, in order; parameters as their lead in brackets."""
    found: list[str] = []

    def walk(nodes: tuple[object, ...]) -> None:
        for node in nodes:
            if isinstance(node, Text):
                found.append(node.text)
            elif isinstance(node, Parameter):
                found.append(f"[{node.lead}]")
            elif isinstance(node, Union):
                walk(node.members)
            elif isinstance(node, Module | ChatTurn):
                walk(node.children)

    walk(children(inside))
    return found


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("\n  Two\n  lines\twide \n", ["Two lines wide"]),
        ("one\n \n\n two", ["one\n\ntwo"]),
        ("a <module name='m'>\n b\n</module>\n c", ["a", " b", " c"]),
        ("a<module name='m'>b</module>c", ["a", "b", "c"]),
        ("a <union><module name='m'>b</module><module name='n'>c </module></union>d", ["a", " b", " c", " d"]),
        ("a<union>\n<module name='m'>b</module>\n<module name='n'>c</module></union>d", ["a", " b", " c", "d"]),
        ("a<union><module name='m'>b </module><module name='n'>c</module></union>d", ["a", "b", "c", " d"]),
        ("a\n\n<module name='m'>b</module>", ["a", "\n\nb"]),
        ("a <parameter name='p' length='1'/> b", ["a", "[ ]", " b"]),
        ("a<parameter name='p' length='1'/>b", ["a", "[]", "b"]),
        ("a\n\n<parameter name='p' length='1'/>", ["a\n\n", "[]"]),
        ("<![CDATA[a  ]]><parameter name='p' length='1'/>", ["a ", "[ ]"]),
        ("a <module name='m'><parameter name='p' length='1'/></module>", ["a", "[ ]"]),
        ("a\n<user>\n b \n</user>\n c", ["a", "b", "c"]),
        ("a <!-- \n\n --> b", ["a b"]),
        ("a\n<!-- x -->\nb", ["a b"]),
        ("a <![CDATA[ <b>\n  &amp; ]]> c", ["a  <b>\n  &amp;  c"]),
        ("&lt;b&gt; &amp;amp; &#8364; &quot;", ['<b> &amp; € "']),
        ("a&#13; b", ["a\r b"]),
        ("a\u00a0 b", ["a\u00a0 b"]),
        ("<module name='m' xml:space='preserve'> a\n  b </module> c", [" a\n  b ", " c"]),
    ],
)
def test_whitespace_and_escapes(inside: str, expected: list[str]) -> None:
    assert said(inside) == expected


def test_a_schema_of_everything() -> None:
    tree = Schema.from_text(
        """<schema name="travel" scaffold="plan tips; plan  x/y">
          <system>You plan.</system>
          <user><module name="plan" cache="true">A <param name="days" len="5"/>
            <union><module name="miami">M</module><module name="paris" confidential="true">P</module></union>
          </module></user>
          <module name="tips">T</module><module name="x"><module name="y">Y</module></module>
        </schema>"""
    ).tree
    assert tree.name == "travel"
    assert tree.scaffolds == (("plan", "tips"), ("plan", "x/y"))
    system, user, tips, x = tree.children
    assert isinstance(system, ChatTurn)
    assert isinstance(user, ChatTurn)
    assert (system.role, user.role) == ("system", "user")
    [plan] = user.children
    assert isinstance(plan, Module)
    text, days, union = plan.children
    assert isinstance(text, Text)
    assert isinstance(days, Parameter)
    assert isinstance(union, Union)
    assert (days.name, days.length, days.place.line, days.place.column) == ("days", 5, 3, 52)
    assert [(each.name, each.confidential) for each in union.members] == [("miami", False), ("paris", True)]
    assert isinstance(tips, Module)
    assert isinstance(x, Module)


def test_a_file_below_the_schemas_folder_is_included_to_the_letter(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "code.txt").write_bytes(b"if a < b:\r\n    return &amp;\r\n")
    (tmp_path / "travel.pml").write_text(
        '<schema name="s">\nRead: <module name="m" src="docs/code.txt"/><user src="docs/code.txt"/></schema>'
    )
    schema = Schema.from_file(tmp_path / "travel.pml")
    _, module, user = schema.tree.children
    assert isinstance(module, Module)
    assert isinstance(user, ChatTurn)
    assert [child.text for child in module.children if isinstance(child, Text)] == [" if a < b:\n    return &amp;"]
    assert [child.text for child in user.children if isinstance(child, Text)] == ["if a < b:\n    return &amp;"]


TRAVEL = Schema.from_text(
    """<schema name="travel"><module name="plan"><parameter name="days" length="3"/>
    <module name="miami">M</module></module><module name="tips">T</module></schema>"""
)


@pytest.mark.parametrize(
    "pml",
    [
        '<prompt schema="travel">Hi <plan days="3 &lt;"> in <miami/></plan><user> Ask\n me </user> end </prompt>',
        'Hi <plan days="3 &lt;"> in <miami/></plan><user> Ask\n me </user> end ',
        '<!-- c --><?xml-stylesheet?>\n<prompt schema="travel">Hi<plan days="3 &lt;"> in<miami/></plan>'
        "<user>Ask me</user>end</prompt>",
    ],
)
def test_prompts_with_and_without_their_element(pml: str) -> None:
    prompt = TRAVEL.prompt(pml)
    assert prompt.imports == (("plan",), ("plan", "miami"))
    assert prompt.arguments["plan",]["days"].value == "3 <"
    hi, plan, user, end = prompt.tree.children
    assert isinstance(hi, Text)
    assert isinstance(plan, Import)
    assert isinstance(user, ChatTurn)
    assert isinstance(end, Text)
    assert hi.text == "Hi"
    assert [child.text for child in plan.children if isinstance(child, Text)] == [" in"]
    assert user.children == (Text("Ask me", user.place),)
    assert end.text == "end"


def test_a_blank_at_the_start_of_a_prompt_belongs_to_its_words() -> None:
    [text] = TRAVEL.prompt('<prompt schema="travel">\n  Be brief.\n</prompt>').tree.children
    assert isinstance(text, Text)
    assert text.text == " Be brief."


def test_a_byte_order_mark_and_a_declaration_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.pml"
    path.write_bytes(b'\xef\xbb\xbf<?xml version="1.0" encoding="latin-1"?>' + '<schema name="s">é</schema>'.encode())
    assert Schema.from_file(path) == Schema.from_text('<schema name="s">é</schema>')
    assert TRAVEL.prompt("\ufeff<tips/>").imports == (("tips",),)
