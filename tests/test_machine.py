"""What the machine has: cgroups of both versions, GPUs in nvidia-smi's words, packages by their versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sapo_node import machine
from sapo_node.machine import find_gpus, find_memory, foreign, parse_gpus

GIB = 1 << 30
SMI = """\
0, GPU-aaa1, NVIDIA H100 80GB HBM3, 81559, 81000
1, GPU-bbb2, NVIDIA L4, 23034, 22000
"""


def tree(root: Path, files: dict[str, str]) -> Path:
    """A file system of a machine with 8 GiB, of which 6 are available."""
    meminfo = f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\nMemAvailable: {6 << 20} kB\nHugePages_Total: 0\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_without_a_limit_it_is_the_machines_memory(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert find_memory(root) == (8 * GIB, 6 * GIB, "memory of this machine")


def test_a_container_of_cgroup_v2(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            group + "memory.max": f"{2 * GIB}\n",
            group + "memory.current": f"{GIB}\n",
            group + "memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
    )
    total, available, limit = find_memory(root)
    assert (total, available) == (2 * GIB, 3 * GIB // 2)  # cached pages of files make room when it is needed
    assert "container" in limit


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/node.service\n",
            "sys/fs/cgroup/system.slice/node.service/memory.max": "max\n",
            "sys/fs/cgroup/system.slice/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/system.slice/memory.current": "0\n",
        },
    )
    assert find_memory(root)[:2] == (3 * GIB, 3 * GIB)


def test_a_container_of_cgroup_v1_that_sees_the_hosts_path(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123abcd\n1:cpu:/\n0::/\n",
            group + "memory.limit_in_bytes": f"{GIB}\n",
            group + "memory.usage_in_bytes": f"{GIB // 4}\n",
        },
    )
    assert find_memory(root)[:2] == (GIB, 3 * GIB // 4)


def test_the_number_that_v1_has_for_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert find_memory(tree(tmp_path, files))[0] == 8 * GIB


def test_this_machine() -> None:
    here = machine.look()
    assert 0 < here.available <= here.memory
    assert here.memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_looking_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sapo_node import fit, machine; from pathlib import Path\n"
        "from sapo_node.model_shape import folder_here, read_shape\n"
        "machine.look(); read_shape(folder_here('demo'))\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_gpus() -> None:
    gpus, notes = parse_gpus(SMI, None)
    assert [(gpu.index, gpu.name, gpu.total >> 20, gpu.free >> 20) for gpu in gpus] == [
        (0, "NVIDIA H100 80GB HBM3", 81559, 81000),
        (1, "NVIDIA L4", 23034, 22000),
    ]
    assert notes == ()


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [("", []), ("-1", []), ("1", [1]), ("1,0", [1, 0]), ("GPU-bbb", [1]), ("0,7,1", [0]), ("NoDevFiles", [])],
)
def test_only_visible_gpus_count(visible: str, indexes: list[int]) -> None:
    assert [gpu.index for gpu in parse_gpus(SMI, visible)[0]] == indexes


def test_a_gpu_that_tells_no_memory_is_named() -> None:
    gpus, notes = parse_gpus("0, GPU-ccc3, NVIDIA GB10, [N/A], [N/A]\n", None)
    assert gpus == ()
    assert "NVIDIA GB10" in notes[0]


def program(folder: Path, script: str) -> dict[str, str]:
    """An environment whose nvidia-smi is this shell script."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_nvidia_smi_is_asked(tmp_path: Path) -> None:
    gpus, notes = find_gpus(program(tmp_path, 'echo "0, GPU-a, NVIDIA L4, 23034, 22000"'))
    assert [gpu.name for gpu in gpus] == ["NVIDIA L4"]
    assert notes == ()


def test_a_driver_that_fails_is_told(tmp_path: Path) -> None:
    gpus, notes = find_gpus(program(tmp_path, "exit 9"))
    assert gpus == ()
    assert "nvidia-smi failed" in notes[0]


def test_a_driver_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SMI_SECONDS", 0.2)
    gpus, notes = find_gpus(program(tmp_path, "exec sleep 30"))
    assert gpus == ()
    assert "did not answer within 0.2 s" in notes[0]


@pytest.mark.parametrize(
    ("torch", "torchvision", "expected"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0", "0.28.0", False),
        ("2.13.0+cpu", None, False),
    ],
)
def test_a_torchvision_of_another_build(torch: str, torchvision: str | None, expected: bool) -> None:
    assert foreign(torch, torchvision) is expected
