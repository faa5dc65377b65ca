import asyncio
import os
import signal

from sapo_node import stop_signal


def test_a_sigterm_that_came_before_the_loop_listens_is_heard() -> None:
    heard: list[int] = []

    async def live() -> None:
        stop_signal.listen(asyncio.get_running_loop(), lambda: heard.append(1))
        await asyncio.sleep(0.05)

    with stop_signal.held():
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == []
        asyncio.run(live())
    assert heard == [1]


def test_after_the_block_signals_and_those_of_children_are_as_before() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with stop_signal.held():
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
