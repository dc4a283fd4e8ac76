"""Writer of schemas as PML; reading it again gives the same tree."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from choreo_agents.pml.markup.syntax import ChatTurn, Module, Parameter, SchemaNode, SchemaTree, Text, Union
from choreo_agents.pml.markup.whitespace import is_settled

_INDENT = "  "


def write_schema(tree: SchemaTree) -> str:
    """Return the PML of a schema.

    Lines are broken only where whitespace is dropped or stands for a blank; text that PML would change is CDATA.
    """
    scaffold = "; ".join(" ".join(names) for names in tree.scaffolds)
    writer = _Writer()
    writer.out.append(f"<schema name={quoteattr(tree.name)}{_attribute('scaffold', scaffold)}>")
    writer.children(tree.children, 1)
    if writer.loose:
        writer.line(0)
    return "".join([*writer.out, "</schema>\n"])


def _attribute(name: str, value: str) -> str:
    return f" {name}={quoteattr(value)}" if value else ""


class _Writer:
    def __init__(self) -> None:
        self.out: list[str] = []
        self.loose = True
        """Whether whitespace is dropped here."""
        self.led = False
        """Whether a line break has been written for the blank before the next text."""

    def line(self, depth: int) -> None:
        self.out.append("\n" + _INDENT * depth)

    def children(self, children: tuple[SchemaNode, ...], depth: int) -> None:
        after: SchemaNode | None = None
        for child in children:
            if self.loose or isinstance(child, ChatTurn):
                self.line(depth)
            elif not self.led and _is_led(child) and _is_block(child, after):
                self.line(depth)
                self.led = True
            after = child
            match child:
                case Text():
                    self.text(child.text)
                case Parameter():
                    self.parameter(child)
                case Module():
                    self.module(child, depth)
                case Union():
                    self.union(child, depth)
                case ChatTurn():
                    self.out.append(f"<{child.role}>")
                    self.loose = True
                    self.children(child.children, depth + 1)
                    self.line(depth)
                    self.out.append(f"</{child.role}>")
                    self.loose = True

    def text(self, text: str) -> None:
        if self.led:
            self.out.append(_escaped(text[1:]))
        elif is_settled(text, at_start=self.loose):
            self.out.append(_escaped(text))
        else:
            self.out.append("&#13;".join(_cdata(part) for part in text.split("\r")))
        self.loose = self.led = False

    def parameter(self, parameter: Parameter) -> None:
        if parameter.lead and not self.led:
            self.out.append("<![CDATA[ ]]>" if self.loose else " ")
        scaffold = _attribute("scaffold", parameter.scaffold)
        self.out.append(f'<parameter name={quoteattr(parameter.name)} length="{parameter.length}"{scaffold}/>')
        self.loose = self.led = False

    def module(self, module: Module, depth: int) -> None:
        flags = ("" if module.cache else ' cache="false"') + (' confidential="true"' if module.confidential else "")
        self.out.append(f"<module name={quoteattr(module.name)}{flags}>")
        self.children(module.children, depth + 1)
        if self.loose and module.children:
            self.line(depth)
        self.out.append("</module>")

    def union(self, union: Union, depth: int) -> None:
        self.out.append(f"<union{_attribute('scaffold', union.scaffold)}>")
        loose, led, after = self.loose, self.led, []
        for member in union.members:
            self.loose, self.led = loose, led
            if loose or led:
                self.line(depth + 1)
            self.module(member, depth + 1)
            after.append(self.loose)
        self.loose, self.led = all(after) if after else loose, False
        if self.loose:
            self.line(depth)
        self.out.append("</union>")


def _is_led(node: SchemaNode) -> bool:
    """Return whether a node's text starts with a blank, which a line break before its tag can replace."""
    match node:
        case Text():
            return node.text.startswith(" ") and is_settled(node.text, at_start=False)
        case Parameter():
            return bool(node.lead)
        case Module():
            return bool(node.children) and _is_led(node.children[0])
        case Union():
            return bool(node.members) and all(_is_led(member) for member in node.members)
        case ChatTurn():
            return False


def _is_block(node: SchemaNode, after: SchemaNode | None) -> bool:
    """Return whether a node should start on a line of its own."""
    return isinstance(node, Module | Union) or (isinstance(node, Text) and isinstance(after, Module | Union))


def _escaped(text: str) -> str:
    return escape(text).replace("\r", "&#13;")


def _cdata(text: str) -> str:
    return f"<![CDATA[{text.replace(']]>', ']]]]><![CDATA[>')}]]>" if text else ""
