"""Locks this process away before it touches what strangers sent: answers, and coordinates of questions.

Some of ReasoningGYM's scorers evaluate the text of an answer, so an answer is a program. `enter` puts four layers
around the process, for good, as root and as an ordinary user:

- resource limits: memory, open files, file size 0, no core dump;
- Landlock: reads only Python's own folders, writes nowhere, binds and connects no TCP, signals nobody outside;
- a seccomp filter: no new sockets, no fork or exec, no opening for writing, no signals to others, no tracing, no
  changing of owners, modes, mounts, limits or namespaces. Threads may start (clone with CLONE_THREAD);
- what the parent does: a scrubbed environment, no inherited descriptors but the channel, a deadline, a kill.

What this does NOT cover. It is not a virtual machine: a bug in the kernel's system calls that stay allowed is not
stopped. Code that gets to run inside may read the Python installation, learn the time, burn one core until its
deadline, and change this very process: it could forge the rewards and questions of later jobs until the worker is
replaced. Therefore answers to the offered tasks are filtered before a scorer that evaluates sees them
(`reasoning_gym.reward`); the sandbox is the second line. Timing side channels are not covered. Where a kernel or
system lacks a layer (macOS has none but the limits), `enter` goes on without it and says so in `missing`.
"""

import contextlib
import ctypes
import errno
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Final

from msgspec import Struct

import sapo_node

MEMORY_BYTES: Final = 512 << 20
"""Address space beyond what the imports took. A scorer needs a few MB; a bomb ends here as a MemoryError."""

OPEN_FILES: Final = 64
"""The channel, the output, and a data file at a time."""

# Reading is allowed below these; /usr and /lib hold shared libraries that Python loads late.
_READABLE = ("/usr", "/lib", "/lib64", "/dev/null", "/dev/urandom", "/etc/localtime", "/etc/ld.so.cache")

# System calls refused with EPERM, whatever their arguments.
_DENIED = """
    socket socketpair connect bind listen accept accept4
    fork vfork execve execveat
    kill tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal pidfd_getfd
    ptrace process_vm_readv process_vm_writev process_madvise kcmp perf_event_open bpf userfaultfd
    io_uring_setup io_uring_enter io_uring_register memfd_create memfd_secret name_to_handle_at open_by_handle_at
    creat mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat mknod mknodat
    truncate ftruncate fallocate
    chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat utime utimes utimensat futimesat
    setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
    mount umount2 move_mount fsopen fsmount fspick open_tree mount_setattr pivot_root chroot unshare setns
    setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset setrlimit setpriority
    sched_setaffinity sched_setscheduler sched_setparam sched_setattr ioprio_set migrate_pages move_pages
    shmget shmat msgget semget mq_open add_key request_key keyctl personality
    init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl syslog
    settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname
""".split()  # noqa: SIM905 - a list of quoted names would hide the groups

_CLONE_THREAD = 0x00010000
_WRITING = (os.O_WRONLY, os.O_RDWR)  # the two access modes that write, under the mask O_ACCMODE


class Protection(Struct, frozen=True, kw_only=True):
    """What surrounds the process now."""

    landlock: int  # ABI version in force, 0 for none
    seccomp: bool
    missing: list[str]  # for people: each layer that could not be put up, with the reason; empty is best


def enter() -> Protection:
    """Lock this process away, irreversibly. Import everything first, and start no thread before.

    Raises RuntimeError when other threads run: Landlock would leave them outside.
    """
    missing: list[str] = []
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        import pyseccomp  # noqa: F401 - finding libseccomp writes and forks; `_seccomp` tells when it failed
    if sys.platform != "linux":
        _limit()
        return Protection(landlock=0, seccomp=False, missing=[f"no Landlock and no seccomp on {sys.platform}"])
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run already; the sandbox must be entered before the first one starts")
    _limit()
    try:
        landlock = _landlock()
    except OSError as error:
        landlock = 0
        missing.append(f"no Landlock (the kernel has none, or a filter forbids it): {error.strerror}")
    try:
        _seccomp()
    except (ImportError, OSError, RuntimeError) as error:  # pyseccomp raises RuntimeError without libseccomp
        missing.append(f"no seccomp filter (is libseccomp installed?): {error}")
        return Protection(landlock=landlock, seccomp=False, missing=missing)
    return Protection(landlock=landlock, seccomp=True, missing=missing)


def _limit() -> None:
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: OPEN_FILES}
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MEMORY_BYTES
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _readable() -> list[str]:
    """Existing paths that may be read: Python's own folders and this package, not the working folder."""
    installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    folders = {sys.prefix, sys.base_prefix, str(Path(sapo_node.__file__).parent), *installed}
    return sorted({os.path.realpath(path) for path in (*folders, *_READABLE) if os.path.exists(path)})


def _landlock() -> int:
    """Restrict the file system, TCP and signals by Landlock (kernel documentation, userspace-api/landlock).

    Returns the ABI version in force; raises OSError where there is none.
    """
    create_ruleset, add_rule, restrict_self = 444, 445, 446  # the same on all architectures
    abi = _syscall(create_ruleset, None, 0, 1)
    every_access = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    read_file, read_dir = 1 << 2, 1 << 3
    every_tcp, every_scope = 0b11, 0b11
    attributes = struct.pack("=QQQ", every_access, every_tcp, every_scope)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _syscall(create_ruleset, attributes, size, 0)
    try:
        for path in _readable():
            access = read_file | read_dir if os.path.isdir(path) else read_file
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                _syscall(add_rule, ruleset, 1, struct.pack("=Qi", access, handle), 0)
            finally:
                os.close(handle)
        no_new_privileges = 38
        _libc().prctl(no_new_privileges, 1, 0, 0, 0)
        _syscall(restrict_self, ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _seccomp() -> None:
    import pyseccomp as seccomp  # not at the top: not every system has libseccomp

    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    refused = seccomp.ERRNO(errno.EPERM)

    def deny(name: str, *arguments: object, action: int = refused) -> None:
        if seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) != -1:  # -1: newer than this libseccomp
            rules.add_rule(action, name, *arguments)

    for name in _DENIED:
        deny(name)
    masked, own = seccomp.MASKED_EQ, seccomp.NE
    deny("clone", seccomp.Arg(0, masked, _CLONE_THREAD, 0))
    # Their flags lie in memory, where a filter cannot look. ENOSYS makes libc fall back to clone and openat.
    deny("clone3", action=seccomp.ERRNO(errno.ENOSYS))
    deny("openat2", action=seccomp.ERRNO(errno.ENOSYS))
    for name, position in (("open", 1), ("openat", 2)):
        for mode in _WRITING:
            deny(name, seccomp.Arg(position, masked, os.O_ACCMODE, mode))
        deny(name, seccomp.Arg(position, masked, os.O_CREAT, os.O_CREAT))
        deny(name, seccomp.Arg(position, masked, os.O_TRUNC, os.O_TRUNC))
    deny("tgkill", seccomp.Arg(0, own, os.getpid()))  # abort() signals itself
    deny("prlimit64", seccomp.Arg(2, own, 0))  # a null pointer only reads
    rules.load()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: object) -> int:
    result = int(_libc().syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
