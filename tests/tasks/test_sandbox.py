"""What a locked-away process cannot do. Each thing is first shown to work outside, so that no test passes by accident.

The scripts run in processes of their own, as the sandbox has no way out.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

EVALUATING = [
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
]

PLANT = """
import os, sys
names, folder, inside = sys.argv[1].split(","), sys.argv[2], sys.argv[3] == "inside"
import reasoning_gym
made = {name: reasoning_gym.create_dataset(name, seed=1, size=1) for name in names}
entries = {name: dataset[0] for name, dataset in made.items()}
if inside:
    from sapo_node.tasks.sandbox import enter
    protection = enter()
    assert not protection.missing, protection.missing
for name, dataset in made.items():
    plant = f"__import__('os').mkdir({os.path.join(folder, name)!r})"
    # number_sorting evaluates the truth, not the answer
    entry, answer = ({**entries[name], "answer": plant}, "[1]") if name == "number_sorting" else (entries[name], plant)
    try:
        dataset.score_answer(answer, entry)
    except Exception:
        pass
"""

ESCAPES = """
import contextlib, json, os, resource, signal, socket, subprocess, sys, threading
from sapo_node.tasks.sandbox import enter
folder, inside, user = sys.argv[1], sys.argv[2] == "inside", int(sys.argv[3])
"".encode("idna")  # loads the codec that connecting needs
if user:  # after the imports: Python itself may lie where only root reads
    with contextlib.suppress(ImportError):
        import pyseccomp
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
secret, victim = os.path.join(folder, "secret"), os.path.join(folder, "victim")
ours, theirs = socket.socketpair()
server = socket.create_server(("127.0.0.1", 0))
for path in (secret, victim):
    with open(path, "w") as file:
        file.write("x")
if inside:
    protection = enter()
    assert not protection.missing, protection.missing

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def thread():
    done = []
    worker = threading.Thread(target=lambda: done.append(1))
    worker.start()
    worker.join()
    assert done

def talk():
    ours.sendall(b"beat")
    assert theirs.recv(4) == b"beat"

def connect():
    with socket.create_connection(server.getsockname(), timeout=2):
        pass

def limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(1, soft - 1), hard))

actions = {
    "thread": thread,
    "talk over the channel": talk,
    "read the library": lambda: open(os.__file__).read(),
    "TCP socket": lambda: socket.socket(socket.AF_INET).close(),
    "unix socket": lambda: socket.socket(socket.AF_UNIX).close(),
    "socket pair": lambda: [end.close() for end in socket.socketpair()],
    "connect": connect,
    "fork": fork,
    "subprocess": lambda: subprocess.run(["/bin/true"], check=True),
    "spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "read a file elsewhere": lambda: open(secret).read(),
    "list a folder elsewhere": lambda: os.listdir(folder),
    "write": lambda: open(os.path.join(folder, "new"), "w").write("x"),
    "append": lambda: open(victim, "a").write("x"),
    "mkdir": lambda: os.mkdir(os.path.join(folder, "dir")),
    "chmod": lambda: os.chmod(victim, 0o666),
    "utime": lambda: os.utime(victim),
    "truncate": lambda: os.truncate(victim, 0),
    "symlink": lambda: os.symlink(secret, os.path.join(folder, "symlink")),
    "link": lambda: os.link(victim, os.path.join(folder, "link")),
    "rename": lambda: os.rename(victim, victim + "2"),
    "unlink": lambda: os.unlink(victim + "2"),
    "memfd": lambda: os.close(os.memfd_create("x")),
    "change limits": limit,
    "allocate 600 MB": lambda: len(bytearray(600 << 20)),
    "read the parent's environment": lambda: open(f"/proc/{os.getppid()}/environ").read(),
    "signal the parent": lambda: os.kill(os.getppid(), 0),
}
worked = []
for name, action in actions.items():
    try:
        action()
        worked.append(name)
    except (OSError, MemoryError, ValueError):
        pass
print(json.dumps(worked))
"""

ALLOWED = ["thread", "talk over the channel", "read the library"]

# As whom to run: as ourselves, and where we are root as an ordinary user too.
USERS = [0, 65534] if os.geteuid() == 0 else [0]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may write to, with a file to read and one to damage."""
    with tempfile.TemporaryDirectory(prefix="sapo-test-") as name:
        path = Path(name)
        path.chmod(0o777)
        yield path


def run(script: str, *arguments: str) -> str:
    """Output of a script in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="sapo-test-") as scratch:
        Path(scratch).chmod(0o777)
        env = {"MPLCONFIGDIR": scratch, "HOME": scratch, "PATH": os.environ["PATH"], "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-B", "-c", script, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def attempt(folder: Path, where: str, user: int) -> list[str]:
    """What of ESCAPES worked."""
    worked: list[str] = json.loads(run(ESCAPES, str(folder), where, str(user)))
    return worked


@pytest.mark.parametrize("user", USERS)
def test_only_threads_the_channel_and_the_library_are_left_inside(folder: Path, user: int) -> None:
    worked = attempt(folder, "inside", user)
    assert worked == (ALLOWED if "read the library" in worked else ALLOWED[:-1])


@pytest.mark.parametrize("user", USERS)
def test_the_same_things_work_outside(folder: Path, user: int) -> None:
    worked = attempt(folder, "outside", user)
    # An ordinary user may not look at or signal a parent that belongs to root.
    assert set(worked) >= {*ALLOWED[:-1], "connect", "fork", "spawn", "write", "chmod", "unlink", "allocate 600 MB"}
    if user == 0:
        assert {"read the parent's environment", "signal the parent"} <= set(worked)


@pytest.mark.slow
def test_code_planted_in_answers_fires_outside_and_not_inside(folder: Path) -> None:
    run(PLANT, ",".join(EVALUATING), str(folder), "outside")
    fired = sorted(path.name for path in folder.iterdir())
    assert fired == EVALUATING
    for path in folder.iterdir():
        path.rmdir()
    run(PLANT, ",".join(EVALUATING), str(folder), "inside")
    assert list(folder.iterdir()) == []


def test_entering_with_a_second_thread_is_refused() -> None:
    script = """
import threading
from sapo_node.tasks.sandbox import enter
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    enter()
except RuntimeError as error:
    print(error)
"""
    assert "2 threads run already" in run(script)


def test_a_missing_layer_is_told_and_the_others_still_hold(folder: Path) -> None:
    script = """
import sys
sys.modules["pyseccomp"] = None  # as where libseccomp is not installed
from sapo_node.tasks.sandbox import enter
protection = enter()
print(protection.landlock > 0, protection.seccomp, protection.missing)
try:
    open(sys.argv[1] + "/new", "w")
except PermissionError:
    print("not written")
"""
    told = run(script, str(folder))
    assert told.startswith("True False ['no seccomp filter (is libseccomp installed?)")
    assert "not written" in told
