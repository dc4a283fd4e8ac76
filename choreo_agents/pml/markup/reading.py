"""Reader of files and of XML, into elements with the source positions of themselves and their attributes.

Document types, and with them entity bombs and external entities, are refused. For a document that is not well-formed,
the elements before the error are returned, with a problem. A schema can include only files below its own folder.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

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


def read_xml(tag: str, text: str, source: str, problems: Problems, around: tuple[str, str] = ("", "")) -> RawElement:
    """Read a document and return its root, as far as it is well-formed.

    Args:
        tag: Tag of the root.
        text: The document.
        source: Name of the document in source positions.
        problems: Collects problems.
        around: Tags to put around the text; source positions do not count them.

    Raises:
        PMLError: There is no such root.
    """
    text = text.removeprefix("\ufeff")
    places = Places(text, source, around[0])
    if (bad := _NOT_XML.search(text)) is not None:
        place = places.at(bad.start() + len(around[0]))
        problems.add(place, f"the character {bad.group()!r} is not allowed in XML", "text without it")
        problems.require_none()
    elements = _Elements(places)
    try:
        elements.parser.Parse(around[0] + text + around[1], True)
    except expat.ExpatError as error:
        place, reason = places.at(places.index(error.lineno, error.offset)), expat.ErrorString(error.code)
        problems.add(place, f"not well-formed XML: {reason}", _HINTS.get(reason, "") or elements.expected())
    except _RefusedError as error:
        problems.add(elements.here(), *error.args)
    root = elements.root
    if root is not None and root.tag != tag:
        problems.add(root.place, f"the document is a <{root.tag}>", f"<{tag}>")
    if root is None or root.tag != tag:
        problems.require_none()
    assert root is not None
    return root


_HINTS = {
    "undefined entity": "&lt; &gt; &amp; &quot; &apos; or a number like &#8364;",
    "no element found": "an element",
    "junk after document element": "nothing after the first element",
    "duplicate attribute": "each attribute once",
}


class _RefusedError(Exception):
    """A document is refused: a message, and what was expected."""


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


class _Elements:
    """Elements of a document, built while expat parses it."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.root: RawElement | None = None
        self.open: list[RawElement] = []
        self.buffer: list[str] = []
        self.in_cdata = False
        self.text_from = 0
        """Index after the last tag, from which the next text is searched."""
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self.buffer.append
        self.parser.StartCdataSectionHandler = self._toggle_cdata
        self.parser.EndCdataSectionHandler = self._toggle_cdata
        self.parser.CommentHandler = lambda _: self._flush()
        self.parser.ProcessingInstructionHandler = lambda *_: self._flush()
        # Without a document type, there are no entities but those of XML itself.
        self.parser.StartDoctypeDeclHandler = self._refuse_doctype

    def here(self) -> SourcePlace:
        return self.places.at(self._index())

    def expected(self) -> str:
        """Return what a document that ends here still needs."""
        return f"</{self.open[-1].tag}> for line {self.open[-1].place.line}" if self.open else "well-formed XML"

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._flush()
        if len(self.open) >= MOST_NESTED:
            raise _RefusedError(f"more than {MOST_NESTED} elements are nested", f"at most {MOST_NESTED}")
        index = self._index()
        self.text_from, where = self._attributes(index, name)
        element = RawElement(name, self.places.at(index), attributes, where)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def _end(self, _: str) -> None:
        self._flush()
        self.open.pop()
        index = self._index()
        if self.places.text.startswith("</", index):
            self.text_from = self.places.text.find(">", index) + 1

    def _toggle_cdata(self) -> None:
        self._flush()
        self.in_cdata = not self.in_cdata

    def _refuse_doctype(self, *_: object) -> None:
        raise _RefusedError("document types and entities are refused", "a document without <!DOCTYPE")

    def _index(self) -> int:
        return self.places.index(self.parser.CurrentLineNumber, self.parser.CurrentColumnNumber)

    def _flush(self) -> None:
        text = "".join(self.buffer)
        self.buffer.clear()
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


def read_document(path: Path) -> str:
    """Read a UTF-8 document; raise `OSError` if there is no such file, and `PMLError` if it is not UTF-8."""
    problems = Problems()
    text = _decode(path.read_bytes(), str(path), problems)
    problems.require_none()
    return text


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
            bad = _NOT_XML.search(text)
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
        problems.add(Places(before, name).at(len(before)), f"the byte 0x{byte:02x} is not UTF-8", "a file in UTF-8")
        return ""
