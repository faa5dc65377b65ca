"""scripts/audit.sh tells findings, silence and a database that could not be asked apart. Stand-ins answer: the real
pip-audit needs the internet."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "audit.sh"
ARGUMENTS = "while [ $# -gt 1 ]; do case $1 in --output) out=$2;; --requirement) asked=$2;; esac; shift; done"


def audit(tool: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PIP_AUDIT": str(tool)}
    return subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=60)


def stand_in(folder: Path, body: str) -> Path:
    tool = folder / "pip-audit"
    tool.write_text(f"#!/bin/bash\n{ARGUMENTS}\n{body}\n")
    tool.chmod(0o755)
    return tool


def test_every_pin_is_asked_about_and_torch(tmp_path: Path) -> None:
    done = audit(stand_in(tmp_path, f"cat $asked >> {tmp_path}/asked"))
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().split()
    assert any(line.startswith("torch==") for line in asked)
    pinned = [
        line.split()[0]
        for file in (SCRIPT.parent.parent / "requirements").glob("*.txt")
        for line in file.read_text().splitlines()
        if "==" in line.split("#")[0]
    ]
    assert set(pinned) <= set(asked)
    assert "torch.txt: nothing is known against its 1 packages" in done.stdout


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("echo '| torch | CVE-1 |' > $out; exit 1", 1, "CVE-1"),
        ("echo 'cannot resolve the host' >&2; exit 1", 4, "could not be asked"),
        ("exit 127", 4, "could not be asked"),
    ],
)
def test_findings_and_failures_end_differently(tmp_path: Path, body: str, code: int, told: str) -> None:
    done = audit(stand_in(tmp_path, body))
    assert done.returncode == code
    assert told in done.stdout + done.stderr


def test_a_missing_tool_says_how_to_get_it(tmp_path: Path) -> None:
    done = audit(tmp_path / "nowhere")
    assert done.returncode == 3
    assert "pip install pip-audit" in done.stderr
