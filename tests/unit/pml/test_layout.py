"""Positions (Prompt Cache, section 3.3)."""

from __future__ import annotations

from support.pml import WordModel

from choreo_agents.pml import Schema, compile_schema
from choreo_agents.pml.compiler import ModuleSpan, SlotSpan, UnionSpan


def layout(inside: str) -> ModuleSpan:
    return compile_schema(Schema.from_text(f'<schema name="s">{inside}</schema>'), WordModel().loaded()).layout


def starts(root: ModuleSpan) -> dict[str, tuple[int, int]]:
    return {"/".join(module.path): (module.start, module.length) for module in root.modules()}


def test_modules_start_where_what_is_written_before_them_ends() -> None:
    found = starts(layout("a b <module name='m'>c <module name='n'>d e</module> f</module><module name='o'>g</module>"))
    assert found == {"": (0, 8), "m": (3, 4), "m/n": (4, 2), "o": (7, 1)}  # the start of a conversation is a token


def test_members_of_a_union_share_a_start_and_the_longest_says_where_it_ends() -> None:
    root = layout(
        "<union><module name='short'>a</module><module name='long'>a b c d</module></union><module name='m'>e</module>"
    )
    assert starts(root) == {"": (0, 6), "short": (1, 1), "long": (1, 4), "m": (5, 1)}
    [union] = [child for child in root.children if isinstance(child, UnionSpan)]
    assert (union.start, union.length, union.end) == (1, 4, 5)


def test_unions_inside_a_member_count_by_their_longest_too() -> None:
    inner = "<union><module name='x'>a</module><module name='y'>a b c</module></union>"
    root = layout(f"<union><module name='m'>a {inner}</module><module name='n'>a b</module></union><module name='o'/>")
    assert starts(root)["m"] == (1, 4)
    assert starts(root)["o"] == (5, 0)


def test_parameters_hold_as_many_positions_as_they_are_long() -> None:
    root = layout("<module name='m'>a <parameter name='p' length='7'/> b</module>c")
    [module] = [child for child in root.children if isinstance(child, ModuleSpan)]
    text, slot, after = module.children
    assert isinstance(slot, SlotSpan)
    assert [(span.start, span.length) for span in (text, slot, after)] == [(1, 1), (2, 7), (9, 1)]
    assert (slot.name, slot.lead) == ("p", " ")


def test_turns_are_written_by_the_models_template_and_their_blank_goes_to_the_first_words() -> None:
    root = layout(
        "<system>a</system><user><union><module name='m'>b</module><module name='n'>c</module></union></user>"
        "<assistant><parameter name='p' length='2'/></assistant>"
    )
    own = [span.lead if isinstance(span, SlotSpan) else span.text for span in root.own()]
    assert own == ["<s><|system|> a<|end|><|user|>", "<|end|><|assistant|>", " ", "<|end|>"]
    assert [next(iter(module.own())).text for module in root.modules() if module.path] == [" b", " c"]
