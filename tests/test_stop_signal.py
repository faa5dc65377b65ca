import signal
import subprocess
import sys

from sapo_node import stop_signal

EARLY = """
import asyncio, os, signal
from sapo_node import stop_signal

async def live():
    stop_signal.listen(asyncio.get_running_loop(), lambda: print("heard"))
    await asyncio.sleep(0.05)

with stop_signal.held():
    os.kill(os.getpid(), signal.SIGTERM)
    print("held")
    asyncio.run(live())
"""


def test_a_sigterm_that_came_before_the_loop_listens_is_heard() -> None:
    # In a process of its own: here other threads may run, and one that does not hold the signal would get it.
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["held", "heard"])


def test_after_the_block_signals_and_those_of_children_are_as_before() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with stop_signal.held():
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
