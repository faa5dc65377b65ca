"""README.md of this folder against the code: every way in is listed, and every attack on it has a test."""

import ast
import functools
import re
from pathlib import Path

import msgspec
import pytest

from sapo_node.rollouts import codec, schema
from sapo_node.swarm import protocol
from sapo_node.swarm.dht import RecordProtocol
from scripts.fuzzing.surfaces import SURFACES

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = (HERE / "README.md").read_text(encoding="utf-8")
SURFACE_ROWS, ATTACK_ROWS = PAGE.split("## Attacks")
TESTS = re.findall(r"^\| (.+?) \| `(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?` \|$", ATTACK_ROWS, re.MULTILINE)
HTTP_SERVERS = {
    "aiohttp",
    "fastapi",
    "flask",
    "http.server",
    "hypercorn",
    "quart",
    "sanic",
    "starlette",
    "tornado",
    "uvicorn",
}


def names(column: int) -> set[str]:
    """What stands in backticks in a column of the surfaces."""
    rows = [line.split("|") for line in SURFACE_ROWS.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[column])}


def functions(path: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@functools.cache
def sources() -> list[tuple[Path, ast.Module]]:
    """The modules of the package."""
    paths = sorted((ROOT / "sapo_node").rglob("*.py"))
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def own_tests() -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The attacks of this folder: `path::name` and the function."""
    files = [path for path in sorted(HERE.glob("test_*.py")) if path.name not in ("test_list.py", "test_fuzz.py")]
    return {
        f"tests/hostile/{path.name}::{name}": function
        for path in files
        for name, function in functions(path).items()
        if name.startswith("test_")
    }


def served_streams() -> set[str]:
    """Names of the constants whose streams are served anywhere, whatever the call passes on left out."""
    calls = [node for _, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    first = [call.args[0] for call in calls if getattr(call.func, "attr", "") == "serve_stream"]
    return {argument.attr for argument in first if isinstance(argument, ast.Attribute)}


def test_every_message_of_the_wire_is_listed() -> None:
    structs = {
        name
        for name, value in vars(schema).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct
    }
    assert len(structs) >= 7
    assert structs - names(1) == set()


def test_every_kind_of_envelope_is_listed() -> None:
    kinds = {name for name, value in vars(codec).items() if isinstance(value, bytes) and value in codec._TAGS}
    assert len(kinds) == len(codec._TAGS)
    assert {kind for kind in kinds if f"`{kind}`" not in SURFACE_ROWS} == set()


def test_every_stream_is_listed() -> None:
    declared = {name for name in vars(protocol) if name.endswith("_PROTOCOL")}
    assert len(declared) >= 2
    assert (declared | served_streams()) - names(1) == set()


def test_every_call_of_the_dht_is_listed() -> None:
    calls = {
        name for name in dir(RecordProtocol) if name.startswith("rpc_") and callable(getattr(RecordProtocol, name))
    }
    assert len(calls) >= 3
    assert calls - names(1) == set()


def test_every_topic_and_meeting_place_is_listed() -> None:
    places = {
        name for name in vars(protocol) if name.endswith(("_topic", "_name")) and callable(getattr(protocol, name))
    }
    assert places
    assert places - names(1) == set()


def test_every_http_route_is_listed() -> None:
    """As long as the page says that there are none, nothing of the package imports what would serve one."""
    imported = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {(alias.name, path.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add((node.module, path.name))
    serving = {(name, file) for name, file in imported if name in HTTP_SERVERS or name.split(".")[0] in HTTP_SERVERS}
    if "HTTP: none" in SURFACE_ROWS:
        assert serving == set()
    else:
        assert "### HTTP" in ATTACK_ROWS


def test_every_surface_has_its_fuzz_target_and_every_target_its_surface() -> None:
    assert names(3) == set(SURFACES)
    rows = [line for line in SURFACE_ROWS.splitlines() if line.startswith("| `")]
    assert [row for row in rows if not re.search(r"`[^`]+` \|$", row)] == []


def test_there_are_many_attacks() -> None:
    assert len({(path, name, case) for _, path, name, case in TESTS}) >= 60
    assert len(TESTS) == ATTACK_ROWS.count("\n| ") - ATTACK_ROWS.count("| attack | test |"), "a row cannot be read"


@pytest.mark.parametrize("path", sorted({path for _, path, _, _ in TESTS}))
def test_every_attack_that_is_named_exists(path: str) -> None:
    text, defined = (ROOT / path).read_text(encoding="utf-8"), functions(ROOT / path)
    listed = [(name, case) for _, file, name, case in TESTS if file == path]
    assert [name for name, _ in listed if name not in defined] == []
    assert [case for _, case in listed if case and case not in text] == []


def test_every_attack_of_this_folder_is_listed_and_says_what_it_hopes_for() -> None:
    mine = own_tests()
    assert set(mine) - {f"{path}::{name}" for _, path, name, _ in TESTS} == set()
    assert [name for name, function in mine.items() if "Hope:" not in (ast.get_docstring(function) or "")] == []


def test_what_is_open_is_what_is_expected_to_fail() -> None:
    expected = {
        name
        for name, function in own_tests().items()
        if any("xfail" in ast.unparse(d) for d in function.decorator_list)
    }
    assert {f"{path}::{name}" for attack, path, name, _ in TESTS if "*open*" in attack} == expected
