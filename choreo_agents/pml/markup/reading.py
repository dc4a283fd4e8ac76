"""Reader of files and of XML, into elements with the source positions of themselves and their attributes.

`defusedxml` parses, so that document types, and with them entity bombs and external entities, are refused. For a
document that is not well-formed, the elements before the error are returned, with a problem. A schema can include only
files below its own folder.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler, LexicalHandler, feature_external_ges, property_lexical_handler

from defusedxml import DefusedXmlException
from defusedxml.expatreader import DefusedExpatParser

from choreo_agents.pml.markup.problems import Problems
from choreo_agents.pml.markup.syntax import SourcePlace

MOST_NESTED = 100
"""Upper bound on nested elements."""
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LINE = re.compile(r"\r\n|\r|\n")
_ATTRIBUTE = re.compile(r"""[ \t\r\n]+([^ \t\r\n=/>]+)[ \t\r\n]*=[ \t\r\n]*(?:"[^"]*"|'[^']*')""")
_BLANK = re.compile(r"(?:[ \t\r\n]+|<!--.*?-->)*", re.DOTALL)


@dataclass(frozen=True)
class RawText:
    """Text between two tags; `verbatim` in a CDATA section."""

    text: str
    verbatim: bool
    place: SourcePlace


@dataclass
class RawElement:
    """An XML element with source positions."""

    tag: str
    place: SourcePlace
    attributes: dict[str, str]
    places: dict[str, SourcePlace]
    """Source position of each attribute."""
    children: list[RawElement | RawText] = field(default_factory=list)


def forbidden_character(text: str) -> re.Match[str] | None:
    """Return the first character that XML does not allow."""
    return _NOT_XML.search(text)


def read_xml(
    text: str, source: str, problems: Problems, *, around: tuple[str, str] = ("", "")
) -> tuple[RawElement | None, bool]:
    """Read a document; return its root, and whether it is well-formed to the end.

    Args:
        text: The document.
        source: Name of the document in source positions.
        problems: Collects problems.
        around: Tags to put around the text; source positions do not count them.
    """
    text = text.removeprefix("\ufeff")
    places = Places(text, source, around[0])
    bad = forbidden_character(text)
    if bad is not None:
        place = places.at(bad.start() + len(around[0]))
        problems.add(place, f"the character {bad.group()!r} is not allowed in XML", "text without it")
        return None, False
    parser = DefusedExpatParser(forbid_dtd=True)
    handler = _Handler(places, parser)
    parser.setFeature(feature_external_ges, False)
    parser.setContentHandler(handler)
    parser.setProperty(property_lexical_handler, handler)
    try:
        parser.feed(around[0] + text + around[1])
        parser.close()
    except SAXParseException as error:
        place = places.at(places.index(error.getLineNumber() or 1, error.getColumnNumber() or 0))
        reason = str(error.getMessage())
        problems.add(place, f"not well-formed XML: {reason}", _HINTS.get(reason, "") or handler.expected())
    except DefusedXmlException:
        problems.add(handler.here(), "document types and entities are refused", "a document without <!DOCTYPE")
    except _TooDeepError:
        message = f"more than {MOST_NESTED} elements are nested"
        problems.add(handler.here(), message, f"at most {MOST_NESTED}")
    else:
        return handler.root, True
    return handler.root, False


_HINTS = {
    "undefined entity": "&lt; &gt; &amp; &quot; &apos; or a number like &#8364;",
    "no element found": "an element",
    "junk after document element": "nothing after the first element",
    "duplicate attribute": "each attribute once",
}


class _TooDeepError(Exception):
    pass


class Places:
    """Translation of the parser's lines and columns into source positions and text indices."""

    def __init__(self, text: str, source: str, prefix: str = "") -> None:
        self.text, self.source, self.prefix = prefix + text, source, len(prefix)
        self.starts = [0, *(match.end() for match in _LINE.finditer(self.text))]

    def index(self, line: int, column: int) -> int:
        return self.starts[min(line, len(self.starts)) - 1] + column

    def at(self, index: int) -> SourcePlace:
        index = min(max(index, self.prefix), len(self.text))
        line = bisect_right(self.starts, index)
        start = max(self.starts[line - 1], self.prefix if line == 1 else 0)
        return SourcePlace(self.source, line, index - start + 1)


class _Handler(ContentHandler, LexicalHandler):
    """SAX handler that builds the elements."""

    def __init__(self, places: Places, locator: DefusedExpatParser) -> None:
        super().__init__()
        self.places, self.locator = places, locator
        self.root: RawElement | None = None
        self.open: list[RawElement] = []
        self.buffer: list[str] = []
        self.in_cdata = False
        self.text_from = 0
        """Index after the last tag, from which the next text is searched."""

    def here(self) -> SourcePlace:
        return self.places.at(self._index())

    def expected(self) -> str:
        """Return what a document that ends here still needs."""
        return f"</{self.open[-1].tag}> for line {self.open[-1].place.line}" if self.open else "well-formed XML"

    def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802 - SAX names it
        self._flush()
        if len(self.open) >= MOST_NESTED:
            raise _TooDeepError
        index = self._index()
        end, where = self._attributes(index, name)
        self.text_from = end
        element = RawElement(name, self.places.at(index), dict(attrs.items()), where)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def endElement(self, name: str) -> None:  # noqa: N802 - SAX names it
        self._flush()
        self.open.pop()
        index = self._index()
        if self.places.text.startswith("</", index):
            self.text_from = self.places.text.find(">", index) + 1

    def characters(self, content: str) -> None:
        self.buffer.append(content)

    def startCDATA(self) -> None:  # noqa: N802 - SAX names it
        self._flush()
        self.in_cdata = True

    def endCDATA(self) -> None:  # noqa: N802 - SAX names it
        self._flush()
        self.in_cdata = False

    def comment(self, content: str) -> None:
        self._flush()

    def processingInstruction(self, target: str, data: str) -> None:  # noqa: N802 - SAX names it
        self._flush()

    def _index(self) -> int:
        return self.places.index(self.locator.getLineNumber() or 1, self.locator.getColumnNumber() or 0)

    def _flush(self) -> None:
        text, self.buffer = "".join(self.buffer), []
        if not self.open or not text:
            return
        match = _BLANK.match(self.places.text, self.text_from)
        assert match is not None
        self.open[-1].children.append(RawText(text, self.in_cdata, self.places.at(match.end())))

    def _attributes(self, index: int, tag: str) -> tuple[int, dict[str, SourcePlace]]:
        """Return the end of a start tag, and the source positions of its attributes."""
        at = index + 1 + len(tag)
        where: dict[str, SourcePlace] = {}
        while (match := _ATTRIBUTE.match(self.places.text, at)) is not None:
            where[match.group(1)] = self.places.at(match.start(1))
            at = match.end()
        return self.places.text.find(">", at) + 1, where


MOST_BYTES = 1 << 26
"""Upper bound on the bytes of an included file."""


def read_document(path: Path, problems: Problems) -> str:
    """Read a UTF-8 document; raise `OSError` if there is no such file."""
    return _decode(path.read_bytes(), str(path), problems)


def read_included(folder: Path, name: str, place: SourcePlace, problems: Problems) -> str:
    """Read a file below a folder, after following links, without a line break at its end.

    Returns an empty text, and adds a problem, if it may not or cannot be read.
    """
    expected = f"a UTF-8 file below {str(folder)!r}"
    try:
        root = folder.resolve(strict=True)
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            problems.add(place, f"{name!r} is outside the schema's folder", expected)
        elif not path.is_file():
            problems.add(place, f"there is no file {name!r}", expected)
        elif path.stat().st_size > MOST_BYTES:
            problems.add(place, f"{name!r} is too large to include", f"at most {MOST_BYTES} bytes")
        else:
            text = _decode(path.read_bytes(), str(path), problems)
            bad = forbidden_character(text)
            if bad is None:
                return text.removesuffix("\n")
            problems.add(
                Places(text, str(path)).at(bad.start()), f"the character {bad.group()!r} is not allowed in XML"
            )
    except (OSError, ValueError, RuntimeError) as error:
        problems.add(place, f"{name!r} cannot be read: {error}", expected)
    return ""


def _decode(content: bytes, name: str, problems: Problems) -> str:
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig", errors="replace")
        byte = content[error.start]
        problems.add(Places(before, name).at(len(before)), f"the byte 0x{byte:02x} is no UTF-8", "a file in UTF-8")
        return ""
