"""The documents say what the code does: commands, options, metrics, states, events, exit codes, files, links."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import click
import pytest

from sapo_node.cli import INTERRUPTED, cli
from sapo_node.config import InferenceSection, TrainingSection
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.monitor.metrics import EvalRecord, EventRecord, RoundRecord
from sapo_node.monitor.status import NodeStatus, State
from sapo_node.training.base import TrainCompletion, TrainGroup
from sapo_node.training.checkpoint import TRAINER_FILES

ROOT = Path(__file__).parent.parent
OPERATIONS = ROOT / "docs" / "operations.md"
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
CHECKOUT = (ROOT / ".git").exists()


def section(heading: str, page: Path = OPERATIONS) -> str:
    """The text below a heading, up to the next one of its level or above."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert found, f"{page.name} has no section '{heading}'"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def first_cells(text: str) -> list[str]:
    """The names in backticks in the first column of a section's tables, the head rows left out."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def commands(group: click.Group, prefix: str = "sapo-node") -> Iterator[tuple[str, click.Command]]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix} {name}")
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield f"{prefix} {name}", command


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name.startswith("--")}


COMMANDS = dict(commands(cli))


# ---- commands --------------------------------------------------------------------------------------------------------


def rows_of_commands(text: str) -> dict[str, str]:
    """Command to the whole row of its table."""
    rows = re.findall(r"^\| `(sapo-node [a-z -]+?)(?: [\[A-Z][^`]*)?` \|(.*)$", text, re.MULTILINE)
    return dict(rows)


def test_operations_has_every_command_with_its_options() -> None:
    rows = rows_of_commands(section("Commands"))
    assert set(rows) == set(COMMANDS)
    for name, command in COMMANDS.items():
        cell = rows[name].split("|")[0]
        assert set(re.findall(r"--[a-z-]+", cell)) == options(command), name


def test_readme_has_every_command() -> None:
    assert set(rows_of_commands(section("Commands", README))) == set(COMMANDS)


def command_lines() -> list[tuple[str, list[str]]]:
    """Every command line of the program in a code block or between backticks: page and words."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
        for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
            call = re.search(r"(?:^|[ /])sapo-node( .*)$", line)
            if call and not line.startswith("#"):
                found.append((page.name, shlex.split(call[1], comments=True)))
    return found


@pytest.mark.parametrize(("page", "words"), [pytest.param(*line, id=" ".join(line[1])) for line in command_lines()])
def test_command_lines_in_documents_exist(page: str, words: list[str]) -> None:
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{page}: there is no command {words[0]}"
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help", "-h"}
    unknown = {word.split("=")[0] for word in words if word.startswith("-")} - known
    assert not unknown, f"{page}: {command.name} has no {unknown}"


def test_the_two_commands_of_the_readme_can_be_run() -> None:
    for name in ("scripts/demo.sh", "scripts/test.sh"):
        assert name in section("Try it", README)
        assert os.access(ROOT / name, os.X_OK), name


def test_exit_codes() -> None:
    def codes(kind: type[SapoError]) -> set[int]:
        return {kind.exit_code}.union(*(codes(child) for child in kind.__subclasses__()))

    known = {0, INTERRUPTED, click.UsageError.exit_code} | codes(SapoError)
    assert {int(code) for code in first_cells(section("Exit codes"))} == known
    sentence = re.search(r"Exit codes: (.*?)\. ", README.read_text(encoding="utf-8").replace("\n", " "))
    assert sentence
    assert {int(code) for code in re.findall(r"(?:^|; )(\d+) ", sentence[1])} == known


# ---- what a node says ------------------------------------------------------------------------------------------------


def test_every_state_is_explained() -> None:
    assert first_cells(section("States").split("Fields of node.json")[0]) == list(get_args(State))


def test_every_field_of_the_status_is_explained() -> None:
    fields = first_cells(section("States").split("Fields of node.json")[1])
    assert sorted(fields) == sorted(NodeStatus.__struct_fields__)


@pytest.mark.parametrize(
    ("heading", "record"),
    [
        ("Fields of a round", RoundRecord),
        ("Fields of an evaluation", EvalRecord),
        ("Fields of an event", EventRecord),
    ],
)
def test_every_field_of_a_record_is_explained(heading: str, record: type) -> None:
    table = section(heading).split("| event |")[0]
    assert first_cells(table) == list(record.__struct_fields__)  # type: ignore[attr-defined]


def test_every_event_is_explained() -> None:
    tree = ast.parse((ROOT / "sapo_node" / "node.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call.args[0] for call in calls if getattr(call.func, "attr", "") == "_remember"]
    events = {argument.value for argument in named if isinstance(argument, ast.Constant)}
    assert len(events) >= 5
    assert set(first_cells(section("Fields of an event").split("| event |")[1])) == events


def test_every_metric_of_the_trainer_is_explained() -> None:
    from sapo_node.inference.base import SamplingParams
    from sapo_node.training.policy import make_policy
    from sapo_node.training.trainer import Trainer
    from tests.tiny import make_model, make_tokenizer

    trainer = Trainer(
        make_policy("tiny", make_model(), make_tokenizer()),
        TrainingSection(producer_gradients=True, mask_truncated=False, kl_coef=0.1, external_weighting="likelihood"),
        InferenceSection(max_completion_tokens=16),
        seed=0,
    )
    sampled = trainer.sample(["what is 12 + 34?"], SamplingParams(n=2, max_tokens=8)).groups[0]
    own = [TrainCompletion(text=s.text, finish=s.finish, token_ids=s.token_ids, logprobs=s.logprobs) for s in sampled]
    others = [TrainCompletion(text=text, finish="stop") for text in ("46", "47")]
    groups = [
        TrainGroup(
            group_id=number,
            origin=origin,
            producer=origin,
            question="what is 12 + 34?",
            completions=completions,
            rewards=[1.0, 0.0],
            policy_version=0,
        )
        for number, (origin, completions) in enumerate([("local", own), ("external", others)])
    ]
    measured = set(trainer.step(groups).metrics)
    text = section("Fields of `trainer`")
    table = set(first_cells(text))
    elsewhere = set(re.findall(r"`(\w+)`", text.split("The trainer also measures")[1]))
    assert measured - table == elsewhere
    assert elsewhere <= set(RoundRecord.__struct_fields__)
    assert table <= measured


def test_every_file_of_the_data_directory_is_explained() -> None:
    named = " ".join(first_cells(section("Data directory").split("###")[0]))
    paths = [value for value in vars(DataDir(Path("data"))).values() if value != Path("data")]
    assert len(paths) >= 8
    assert not [path.name for path in paths if path.name not in named]
    assert not [name for name in TRAINER_FILES if name not in section("Data directory")]


# ---- files and words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    pattern = r"(?<![\w./-])(?:scripts|sapo_node|tests|docs|configs|requirements|\.ci)/[\w./-]*\w"
    named = set(re.findall(pattern, page.read_text(encoding="utf-8")))
    assert not sorted(name for name in named if not (ROOT / name).exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_places_in_the_code_exist(page: Path) -> None:
    """`rollouts/pool.py:Pool.consume` names a file of the package and what it defines; the test looks for the name."""
    missing = []
    for file, name in re.findall(r"`((?:\w+/)*\w+\.py)(?::([\w.]+))?`", page.read_text(encoding="utf-8")):
        place = next((folder / file for folder in (ROOT, ROOT / "sapo_node") if (folder / file).is_file()), None)
        if place is None and "/" not in file:
            place = next((ROOT / "sapo_node").rglob(file), None) or next((ROOT / "scripts").rglob(file), None)
        last = name.rpartition(".")[2]
        if place is None or (last and not re.search(rf"\b{last}\b", place.read_text(encoding="utf-8"))):
            missing.append((file, name))
    assert not missing


def test_the_picture_is_small() -> None:
    assert (ROOT / "docs" / "demo.png").stat().st_size < 300_000


@pytest.mark.skipif(not CHECKOUT, reason="needs a git checkout")
def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    """Paths of one machine and addresses of package registries help nobody else."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    forbidden = [
        re.compile(rb"(?<![\w./-])/(?:work|root)(?=[/\s\"'`,;:)]|$)", re.MULTILINE),
        re.compile(rb"\b(?:pypi|pythonhosted|npmjs|download\.pytorch)\.(?:org|com|io)\b", re.I),
        *(re.compile(re.escape(host.encode())) for host in indexes_here()),
    ]
    found = []
    for name in filter(None, listed.split("\0")):
        file = ROOT / name
        if file.suffix not in {".png", ".safetensors"} and file.is_file():
            content = file.read_bytes()
            found += [(name, bad) for pattern in forbidden for bad in pattern.findall(content)]
    assert not found


def indexes_here() -> set[str]:
    """Hosts and folders of the package indexes that pip asks on this machine."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, check=True, text=True
    ).stdout
    variables = " ".join(value for name, value in os.environ.items() if name.startswith("PIP_"))
    addresses = [urlsplit(word) for word in re.findall(r"\w+://[^\s'\"]+", f"{told} {variables}")]
    return {address.hostname or address.path.rstrip("/") for address in addresses} - {"", "localhost", "127.0.0.1"}
