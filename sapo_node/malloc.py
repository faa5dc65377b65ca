"""How the C library's allocator behaves in this process."""

import ctypes
from typing import Final

M_ARENA_MAX: Final = -8  # glibc's malloc.h


def one_arena() -> bool:
    """Let all threads allocate from one arena; to be called before there are any. False where the allocator is not
    glibc's, which has nothing to be told.

    Else each thread gets an arena of its own, and what it frees in large pieces stays with it: 120 batches of bloated
    answers, opened in one thread and stored by another, left a node 27 MiB larger, with one arena 15. Threads of a node
    wait for each other anyway, since only one at a time runs Python.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_ARENA_MAX, 1))
