"""Which pieces a schema is encoded in, and what each attends to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.pml import CHAT, WordModel

from choreo_agents.errors import PMLError
from choreo_agents.models import LoadedModel, PromptText
from choreo_agents.models.chat.format import TurnFormat
from choreo_agents.pml import CompiledSchema, Schema, compile_schema


def compiled(inside: str, *, scaffold: str = "", model: WordModel | None = None) -> CompiledSchema:
    schema = Schema.from_text(f'<schema name="s" scaffold="{scaffold}">{inside}</schema>')
    return compile_schema(schema, (model or WordModel()).loaded())


PLAN = """<module name="plan">a <parameter name="p" length="2"/> b
  <union><module name="x">c</module><module name="y">d</module></union> e</module>
  <module name="tips">f</module> g"""


def test_a_piece_for_each_text_and_slot_and_its_ancestors_text_before_it() -> None:
    parents = {key: piece.parents for key, piece in compiled(f"o {PLAN}").pieces.items()}
    assert parents == {
        "#0": (),
        "plan#0": ("#0",),
        "plan#1": ("#0", "plan#0"),
        "plan#2": ("#0", "plan#0", "plan#1"),
        "plan/x#0": ("#0", "plan#0", "plan#1", "plan#2"),
        "plan/y#0": ("#0", "plan#0", "plan#1", "plan#2"),
        "plan#3": ("#0", "plan#0", "plan#1", "plan#2"),
        "tips#0": ("#0",),
        "#1": ("#0",),
    }


def test_slots_are_filled_with_the_unknown_token_or_one_that_ends() -> None:
    found = compiled(PLAN)
    slot = found.pieces["plan#1"]
    assert slot.tokens == (0, 0)
    assert slot.slot is not None
    assert (slot.slot.name, slot.slot.length, slot.slot.lead) == ("p", 2, " ")
    without = WordModel(unknown=None)
    assert set(compiled(PLAN, model=without).pieces["plan#1"].tokens) == {without.adapter.end_tokens[0]}


def test_the_embedded_models_placeholder_is_what_it_pads_with(embedded: LoadedModel) -> None:
    schema = Schema.from_text(f"<schema name='s'><user>{PLAN}</user></schema>")
    found = compile_schema(schema, embedded)
    assert set(found.pieces["plan#1"].tokens) == {embedded.tokenizer.pad_token_id}
    assert embedded.decode(list(found.pieces["#0"].tokens)) == "<s><|user|>"
    assert embedded.decode(list(found.pieces["plan#0"].tokens)) == " a"


def test_instructions_that_have_no_turn_stand_in_the_users() -> None:
    model = WordModel()
    model.chat = replace(CHAT, system=TurnFormat("", None, "<sep>"), leads=True, merges="<sep>")
    found = compiled("<system>a</system><user>b</user>", model=model).pieces
    assert model.decode(list(found["#0"].tokens)) == model.decode(model.encode("<s><|user|> a<sep>b"))
    # What closes it is apart: a prompt may go on in it.
    assert model.decode(list(found["#1"].tokens)) == model.decode(model.encode("<|end|>"))


def test_what_is_not_cached_or_confidential_is_so_with_all_inside_it() -> None:
    found = compiled(
        """<module name="a" cache="false">x <module name="b">y</module></module>
        <module name="c" confidential="true">x <module name="d">y</module></module><module name="e">z</module>"""
    ).pieces
    assert [key for key, piece in found.items() if not piece.cached] == ["a#0", "a/b#0"]
    assert [key for key, piece in found.items() if piece.confidential] == ["c#0", "c/d#0"]


def test_members_of_a_scaffold_see_those_before_them_and_keep_plain_pieces() -> None:
    inside = """<module name="a">x<module name="i">y</module></module> t <module name="b" confidential="true">u</module>
      <module name="c">v <module name="d">w</module></module>"""
    found = compiled(inside, scaffold="c a; c/d b")
    plain = {key: piece.parents for key, piece in found.pieces.items() if piece.scaffold is None}
    assert plain == compiled_parents(inside)
    variants = {key: piece.parents for key, piece in found.pieces.items() if piece.scaffold is not None}
    assert variants == {
        "c#0 [a c]": ("#0", "a#0", "#1"),
        "c/d#0 [a c]": ("#0", "a#0", "#1", "c#0 [a c]"),
        "c/d#0 [b c/d]": ("#0", "#1", "b#0", "c#0"),
    }
    assert found.keys[("a",), (("a",), ("c",))] == ("a#0",)
    assert found.keys[("a", "i"), (("a",), ("c",))] == ("a/i#0",)
    assert found.pieces["c/d#0 [b c/d]"].confidential  # it has attended to b
    assert not found.pieces["c/d#0"].confidential
    assert {key.partition(" ")[0]: piece.start for key, piece in found.pieces.items()} == {
        key: piece.start for key, piece in found.pieces.items() if piece.scaffold is None
    }


def test_the_third_member_of_a_scaffold_sees_the_second_as_it_was_encoded_with_the_first() -> None:
    inside = "".join(f"<module name='{name}'>{name}</module>" for name in "abc")
    found = compiled(inside, scaffold="a b c").pieces
    assert found["c#0 [a b c]"].parents == ("#0", "a#0", "b#0 [a b c]")


UNIONS = """x <union scaffold="b"><module name="a">y</module>
  <module name="b">z
    <union scaffold="d"><module name="c">u</module><module name="d">v</module></union> w</module></union>
  t <module name="e">s</module>"""


def test_the_scaffold_of_a_union_is_seen_by_what_comes_after_it() -> None:
    standing = ("b#0", "b/d#0", "b#1")
    assert compiled_parents(UNIONS) == {
        "#0": (),
        "a#0": ("#0",),
        "b#0": ("#0",),
        "b/c#0": ("#0", "b#0"),
        "b/d#0": ("#0", "b#0"),
        "b#1": ("#0", "b#0", "b/d#0"),
        "#1": ("#0", *standing),
        "e#0": ("#0", *standing, "#1"),
    }
    assert compiled_parents(UNIONS.replace(' scaffold="b"', ""))["#1"] == ("#0",)
    hidden = compiled(UNIONS.replace('name="d"', 'name="d" confidential="true"')).pieces
    assert hidden["#1"].confidential and not hidden["a#0"].confidential


@pytest.mark.parametrize(
    ("scaffold", "seen"),
    [
        ("a e", ("#0", "a#0", "#1")),
        ("b e", ("#0", "b#0", "b/d#0", "b#1", "#1")),
        ("b/c e", ("#0", "b#0", "b/c#0", "b#1", "#1")),
        ("b/d e", ("#0", "b#0", "b/d#0", "b#1", "#1")),
    ],
)
def test_a_member_that_a_scaffold_of_the_schema_names_stands_in_the_place_of_the_unions(
    scaffold: str, seen: tuple[str, ...]
) -> None:
    assert compiled(UNIONS, scaffold=scaffold).pieces[f"e#0 [{scaffold}]"].parents == seen


def test_a_text_holds_the_place_of_a_parameter() -> None:
    model = WordModel().loaded()
    found = compiled("a <parameter name='p' length='6' scaffold='[some name]'/> b", model=model)
    words = model.encode(PromptText.plain(" [some name]"))
    assert 0 < len(words) < 6
    assert found.pieces["#1"].tokens == (*words, *[0] * (6 - len(words)))
    assert found.pieces["#2"].parents == ("#0", "#1")
    with pytest.raises(PMLError, match=r"the scaffold of parameter 'p' has .* at most its length, 1: raise that"):
        compiled("a <parameter name='p' length='1' scaffold='[some name]'/> b")


def test_confidentiality_comes_down_from_the_module_that_says_it() -> None:
    found = compiled("<module name='a' confidential='true'><module name='b'>x</module></module>").pieces
    assert found["a/b#0"].confidential


def compiled_parents(inside: str) -> dict[str, tuple[str, ...]]:
    return {key: piece.parents for key, piece in compiled(inside).pieces.items()}
