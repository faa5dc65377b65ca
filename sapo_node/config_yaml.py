"""YAML text to plain values, with the line and column of every key and value.

PyYAML's `compose` gives nodes with marks; values are built here, for three reasons: positions survive, duplicate keys
are found, and scalars follow the core schema of YAML 1.2. Under PyYAML's YAML 1.1 `push: on` is true, `3e-4` is a text
and `1:30` is 90. Merge keys (`<<`) belong to YAML 1.1 and are not known here; anchors and aliases are.

Everything is bounded: the file's size, the depth, and the number of values after aliases are expanded.
"""

import re
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

MAX_BYTES = 1 << 20  # a config of a thousand tasks is a tenth of this
MAX_DEPTH = 20  # settings nest 6 deep; Python's own recursion ends near 300 here
MAX_VALUES = 20_000  # after aliases; a chain of ten aliases of ten aliases would fill the memory otherwise

Key = str | int
Path = tuple[Key, ...]  # ("tasks", "mixture", 0, "name")

NULL = "tag:yaml.org,2002:null"
BOOL = "tag:yaml.org,2002:bool"
INT = "tag:yaml.org,2002:int"
FLOAT = "tag:yaml.org,2002:float"
TEXT = "tag:yaml.org,2002:str"
COLLECTIONS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


@dataclass(frozen=True, order=True)
class Mark:
    """A place in the text; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Fault:
    """What is wrong with the text itself, and where."""

    mark: Mark
    message: str
    path: Path = ()


@dataclass
class Document:
    """What a text says. `keys` and `values` hold marks by path; list items have no key of their own."""

    data: Any
    keys: dict[Path, Mark]
    values: dict[Path, Mark]
    faults: list[Fault]


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML's stages up to nodes, with the scalars of YAML 1.2 and a bound on depth."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH}", problem_mark=event.start_mark)
        try:
            node: yaml.Node | None = super().compose_node(parent, index)
            return node
        finally:
            self._depth -= 1


for _tag, _pattern in (
    (NULL, r"~|null|Null|NULL|"),
    (BOOL, r"true|True|TRUE|false|False|FALSE"),
    (INT, r"[-+]?[0-9]+(?:_[0-9]+)*|0x[0-9a-fA-F]+"),
    (FLOAT, r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), None)


def parse(text: str) -> Document:
    """Plain values (None, bool, int, float, str, list, dict with text keys) of one YAML document.

    Never raises for what the text says: what is wrong stands in `faults`. An empty text, and one that is not YAML, is
    None; after a duplicate key its first value stands.
    """
    document = Document(None, {}, {}, [])
    try:
        root = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        mark = Mark(place.line + 1, place.column + 1) if place else Mark(1, 1)
        document.faults.append(Fault(mark, f"not valid YAML: {_syntax(error)}"))
        return document
    except ReaderError as error:
        before = text[: int(error.position)]
        mark = Mark(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        document.faults.append(
            Fault(mark, f"not valid YAML: the character U+{ord(text[len(before)]):04X} is not allowed")
        )
        return document
    if root is not None:
        document.data = _Builder(document).value(root)
    return document


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "cannot be read"
    if "'\\t'" in problem:
        problem = "a tab where spaces are expected; indent with spaces"
    context = error.context_mark
    if error.context and error.problem and context and error.problem_mark and context.line != error.problem_mark.line:
        return f"{problem} ({error.context} that starts at line {context.line + 1})"
    return problem


class _TooMany(Exception):
    """The bound on values is reached; carried to the top at once."""


class _Builder:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._count = 0

    def value(self, root: yaml.Node) -> Any:
        try:
            return self._build(root, ())
        except _TooMany:
            return None

    def _build(self, node: yaml.Node, path: Path) -> Any:
        self._count += 1
        mark = _mark(node)
        if self._count > MAX_VALUES or len(path) > MAX_DEPTH:  # an alias inside its own anchor never ends
            self._fault(mark, "too many values, or an alias inside its own anchor", ())
            raise _TooMany
        self._document.values[path] = mark
        if isinstance(node, yaml.MappingNode) and node.tag in COLLECTIONS:
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag in COLLECTIONS:
            return [self._build(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._fault(mark, f"the tag {node.tag!r} is not supported here", path)
        return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = _mark(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(mark, "a setting's name must be plain text", path)
                continue
            key = str(key_node.value)
            if key in result:
                first = self._document.keys[(*path, key)]
                self._fault(mark, f"set twice; first in line {first.line}", (*path, key))
                continue
            self._document.keys[(*path, key)] = mark
            result[key] = self._build(value_node, (*path, key))
        return result

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text = str(node.value)
        try:
            return _construct(node.tag, text)
        except ValueError as error:
            self._fault(_mark(node), str(error), path)
            return None

    def _fault(self, mark: Mark, message: str, path: Path) -> None:
        self._document.faults.append(Fault(mark, message, path))


def _construct(tag: str, text: str) -> Any:
    """A scalar's value. Raises ValueError with a sentence."""
    if tag == NULL:
        return None
    if tag == BOOL and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if tag == INT and len(text) <= 100:
        return int(text, 16) if text.startswith("0x") else int(text)
    if tag == FLOAT:
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    if tag == TEXT:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("this text holds half a surrogate pair, which is no character") from None
        if "\0" in text:
            raise ValueError("this text holds the character NUL, which no setting can")
        return text
    raise ValueError(f"cannot be read as {tag.removeprefix('tag:yaml.org,2002:')}")


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)
