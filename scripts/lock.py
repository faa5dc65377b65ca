"""Pins every dependency but torch in requirements/base.txt, with the hashes of all its files and without any address.

    .venv/bin/python scripts/lock.py

torch stays out, with what only its CUDA build needs: its builds differ in their dependencies, and setup.sh installs it
first. pip resolves the versions and reads the hashes from whatever index it is configured for; this script only writes
them down. It uses pip's own finder, since pip has no command that lists hashes.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from pip._internal.commands.install import InstallCommand
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import Version

ROOT = Path(__file__).parent.parent
OUT = ROOT / "requirements" / "base.txt"
BUILD = ["hatchling", "editables"]  # an editable install of this project needs them
LEFT_OUT = ("torch", "triton", "nvidia-", "cuda-", "sapo-node")


def resolve() -> dict[str, str]:
    """Name to version of all that an installation with the tests' needs takes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        wanted = [f"{ROOT}[dev]", *BUILD]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", report.name, "torch==2.13.0", *wanted], check=True)
        installed = json.loads(Path(report.name).read_text())["install"]
    pins = {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in installed}
    return {name: version for name, version in sorted(pins.items()) if not name.startswith(LEFT_OUT)}


def hashes(pins: dict[str, str]) -> dict[str, list[str]]:
    """Name to the sha256 of every file of its pinned version that the index offers."""
    command = InstallCommand("install", "")
    options, _ = command.parse_args([])
    with command.main_context(), command._build_session(options) as session:
        finder = command._build_package_finder(options, session)
        finder._ignore_compatibility = True  # wheels for other systems too
        found = {}
        for name, version in pins.items():
            links = [c.link for c in finder.find_all_candidates(name) if c.version == Version(version)]
            found[name] = sorted({link.hash for link in links if link.hash_name == "sha256" and link.hash})
    return found


def main() -> None:
    """Write requirements/base.txt; says how many packages it pins."""
    pins = resolve()
    lines = ["# Written by scripts/lock.py; do not edit. torch is not here on purpose, see there."]
    for name, files in hashes(pins).items():
        if not files:
            raise SystemExit(f"lock: the index gives no sha256 for {name} {pins[name]}")
        lines += [f"{name}=={pins[name]} \\", *(f"    --hash=sha256:{one} \\" for one in files)]
        lines[-1] = lines[-1].removesuffix(" \\")
    OUT.write_text("\n".join(lines) + "\n")
    print(f"{OUT.relative_to(ROOT)}: {len(pins)} packages")


if __name__ == "__main__":
    main()
