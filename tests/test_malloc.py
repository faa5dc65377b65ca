"""The allocator of a node's process."""

import platform
import subprocess
import sys

import pytest

from sapo_node import malloc

THREADS = """
import ctypes, threading
from sapo_node import malloc
{first}
met = threading.Barrier(4)

def work():
    held = [bytearray(60_000) for _ in range(20)]  # below the size from which the allocator asks the kernel for each
    met.wait()

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ctypes.CDLL(None).malloc_stats()
"""


def arenas(first: str) -> int:
    child = subprocess.run(
        [sys.executable, "-c", THREADS.format(first=first)], capture_output=True, text=True, timeout=60, check=True
    )
    return sum(line.startswith("Arena ") for line in child.stderr.splitlines())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator has arenas")
def test_threads_share_one_arena() -> None:
    assert arenas("malloc.one_arena()") == 1
    assert arenas("") > 1


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: object())
    assert not malloc.one_arena()
