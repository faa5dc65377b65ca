"""Workers: typed calls, faults that name themselves, nothing left behind. Real processes throughout."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import uvloop
from msgspec import Struct

from sapo_node import workers
from sapo_node.workers import CallFailed, CallTimeout, Refused, Worker, WorkerDied, WorkerError, WorkerStuck
from tests.harness import alive, descendants, wait_gone

ASYNC = "SAPO_TEST_ASYNC"  # set: the worker serves asynchronously
SLOW = "SAPO_TEST_SLOW"  # set: the worker never gets ready


class Number(Struct):
    value: float


def double(request: Number) -> float:
    return 2 * request.value


def sleep(request: Number) -> str:
    time.sleep(request.value)
    return "slept"


def stand_still(request: Number) -> str:
    workers.stage("standing still", deadline=0.5)
    time.sleep(request.value)
    return "moved"


def hold_lock(request: Number) -> str:
    """Sleep without letting the interpreter lock go, as some native code does: the heartbeat cannot run."""
    workers.stage("holding the lock")
    ctypes.PyDLL(None).usleep(int(request.value * 1e6))
    return "let go"


def walk(request: Number) -> str:
    workers.stage("walking", deadline=0.5)
    for _ in range(int(request.value)):
        time.sleep(0.5)
        workers.progress()
    return "arrived"


def fail(request: Number) -> None:
    raise ValueError(f"no {request.value}")


def refuse(request: Number) -> None:
    raise Refused("that model does not exist; choose another")


def die(request: Number) -> None:
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)


def leave_file(request: Number) -> str:
    """Path of a temporary file that nobody here removes."""
    handle, path = tempfile.mkstemp()
    os.close(handle)
    return path


def give_up(request: Number) -> None:
    workers.give_up("the engine is gone (SIGKILL)")


class SideBySide:
    """Handlers of a worker that serves asynchronously."""

    def __init__(self) -> None:
        self.running = 0
        self.met = asyncio.Event()
        self.waiting: set[asyncio.Task[object]] = set()

    async def double_later(self, request: Number) -> float:
        await asyncio.sleep(0)
        return double(request)

    async def fail_later(self, request: Number) -> None:
        await asyncio.sleep(0)
        fail(request)

    async def meet(self, request: Number) -> str:
        """Returns when that many calls are in here."""
        self.running += 1
        if self.running >= request.value:
            self.met.set()
        await self.met.wait()
        return "met"

    async def count(self, request: Number) -> int:
        """How many calls were in here at once."""
        self.running += 1
        await asyncio.sleep(request.value)
        most = self.running
        await asyncio.sleep(request.value)
        self.running -= 1
        return most

    async def wait(self, request: Number) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.waiting.add(task)
        try:
            await asyncio.sleep(request.value)
        finally:
            self.waiting.discard(task)

    async def interrupt(self, request: Number) -> int:
        """Ends the waiting calls; how many."""
        for task in self.waiting:
            task.cancel()
        return len(self.waiting)

    async def die_later(self, request: Number) -> None:
        die(request)

    async def spawn(self, request: Number) -> list[str]:
        """Start a process with shared memory, as engines do; process ids and the memory's name."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=hold_memory, args=(theirs,))
        self.process.start()
        return [*(str(pid) for pid in descendants(os.getpid())), ours.recv()]


def hold_memory(channel: object) -> None:
    memory = shared_memory.SharedMemory(create=True, size=1000)
    channel.send(memory.name)  # type: ignore[attr-defined]
    time.sleep(600)


def main() -> None:
    if SLOW in os.environ:
        time.sleep(600)
    if ASYNC in os.environ:
        side = SideBySide()
        handlers = [
            *(side.double_later, side.fail_later, side.meet, side.count, side.wait, side.interrupt),
            *(side.die_later, side.spawn),
        ]
        uvloop.run(workers.serve_async({handler.__name__: handler for handler in handlers}))
        return
    handlers = [double, sleep, stand_still, hold_lock, walk, fail, refuse, die, leave_file, give_up]
    workers.serve({handler.__name__: handler for handler in handlers})


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> object:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def runner(coroutine: object) -> object:
        with asyncio.Runner(loop_factory=factory) as loop:
            return loop.run(coroutine)  # type: ignore[arg-type]

    return runner


def made(**settings: float) -> Worker:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return Worker("test", __name__, env=env, **{"start_seconds": 20, **settings})


async def started(**settings: float) -> Worker:
    worker = made(**settings)
    await worker.start()
    return worker


def test_a_call_returns_typed_results_and_stop_ends_the_process(run) -> None:
    async def body() -> None:
        worker = await started()
        assert await worker.call("double", Number(2.5), float, deadline=5) == 5.0
        await worker.stop()
        assert not worker.alive

    run(body())


def test_calls_take_turns(run) -> None:
    async def body() -> None:
        worker = await started()
        results = await asyncio.gather(*(worker.call("double", Number(i), float, deadline=5) for i in range(50)))
        assert results == [2.0 * i for i in range(50)]
        await worker.stop()

    run(body())


def test_a_handler_that_raises_is_told_with_its_place_and_the_worker_lives(run) -> None:
    async def body() -> None:
        worker = await started()
        with pytest.raises(CallFailed, match=r"ValueError: no 3\.0 at .*test_workers\.py:\d+"):
            await worker.call("fail", Number(3), float, deadline=5)
        with pytest.raises(Refused, match="choose another"):
            await worker.call("refuse", Number(3), float, deadline=5)
        assert await worker.call("double", Number(1), float, deadline=5) == 2.0
        await worker.stop()

    run(body())


def test_where_no_process_can_be_made_the_start_fails_as_a_worker_does_and_may_be_tried_again(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none_left(*command: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def body() -> None:
        worker = await started()
        await worker.stop()
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", none_left)
            with pytest.raises(WorkerDied, match=r"could not be started: .*temporarily unavailable"):
                await worker.start()
        await worker.start()
        assert await worker.call("double", Number(1), float, deadline=5) == 2.0
        await worker.stop()

    run(body())


def test_a_death_is_told_with_exit_code_and_last_words_and_start_brings_it_back(run) -> None:
    async def body() -> None:
        worker = await started()
        with pytest.raises(WorkerDied, match=r"(?s)exit code 7.*last words"):
            await worker.call("die", Number(0), float, deadline=5)
        with pytest.raises(WorkerDied, match="exit code 7"):
            await worker.call("double", Number(0), float, deadline=5)
        await worker.start()
        assert await worker.call("double", Number(1), float, deadline=5) == 2.0
        await worker.stop()

    run(body())


def test_the_reason_for_which_a_worker_gives_up_is_told_first(run) -> None:
    async def body() -> None:
        worker = await started()
        with pytest.raises(WorkerDied) as caught:
            await worker.call("give_up", Number(0), float, deadline=5)
        assert "'give_up': the engine is gone (SIGKILL)" in str(caught.value).splitlines()[0]
        await worker.start()
        with pytest.raises(WorkerDied) as caught:
            await worker.call("die", Number(0), float, deadline=5)
        assert "SIGKILL" not in str(caught.value)  # what was said in an earlier life
        await worker.stop()

    run(body())


def test_kill_9_of_an_idle_worker_is_seen_at_the_next_call(run) -> None:
    async def body() -> None:
        worker = await started()
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await worker.call("double", Number(0), float, deadline=5)
        await worker.stop()

    run(body())


def test_a_stop_ends_a_start_that_is_under_way(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOW, "1")

    async def body() -> None:
        worker = made(start_seconds=60)
        starting = asyncio.create_task(worker.start())
        while worker.pid is None:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            await worker.stop()
            with pytest.raises(WorkerDied, match="was stopped"):
                await starting
        assert wait_gone({worker.pid}) == set()

    run(body())


@pytest.mark.parametrize("turns", range(8))
def test_a_start_that_is_cancelled_leaves_no_process(run, turns: int) -> None:
    """After any number of turns of the loop from the spawning on: also before the channel to the process is open."""

    async def body() -> None:
        worker = made()
        starting = asyncio.create_task(worker.start())
        while worker.pid is None:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await starting
        assert wait_gone({worker.pid}) == set()

    run(body())


def test_files_of_the_working_folder_are_no_modules_of_a_worker(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong file')")
    monkeypatch.chdir(tmp_path)

    async def body() -> None:
        worker = made()
        worker._env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        await worker.start()
        await worker.stop()

    run(body())


@pytest.mark.parametrize("how", ["killed", "stopped", "started again"])
def test_temporary_files_of_a_worker_go_with_it(run, how: str) -> None:
    async def body() -> None:
        worker = await started()
        left = Path(await worker.call("leave_file", Number(0), str, deadline=5))
        assert left.exists()
        if how != "stopped":
            os.kill(worker.pid, signal.SIGKILL)
        if how == "started again":
            await worker.start()
            assert Path(await worker.call("leave_file", Number(0), str, deadline=5)).exists()
        await worker.stop()
        assert not left.exists()
        assert not left.parent.exists()

    run(body())


@pytest.mark.slow
def test_a_worker_that_stands_still_is_killed_although_its_heart_beats(run) -> None:
    async def body() -> None:
        worker = await started()
        assert await worker.call("walk", Number(8), str, deadline=30) == "arrived"
        with pytest.raises(WorkerStuck, match="standing still"):
            await worker.call("stand_still", Number(60), str, deadline=30)
        assert not worker.alive
        await worker.stop()

    run(body())


def test_a_stopped_worker_that_owes_an_answer_is_killed(run) -> None:
    async def body() -> None:
        worker = await started(silence_seconds=2)
        call = asyncio.create_task(worker.call("sleep", Number(60), str, deadline=60))
        await asyncio.sleep(0.1)
        os.kill(worker.pid, signal.SIGSTOP)
        async with asyncio.timeout(10):
            with pytest.raises(WorkerStuck, match=r"does not beat.*'sleep'"):
                await call
        assert not worker.alive
        await worker.start()
        assert await worker.call("double", Number(1), float, deadline=5) == 2.0
        await worker.stop()

    run(body())


@pytest.mark.slow
def test_a_worker_that_was_stopped_while_idle_is_killed_at_the_next_call() -> None:
    async def body() -> None:
        worker = await started(silence_seconds=2)
        os.kill(worker.pid, signal.SIGSTOP)
        await asyncio.sleep(3)
        assert worker.alive  # it owes nothing yet
        async with asyncio.timeout(2):
            with pytest.raises(WorkerStuck, match=r"does not beat.*'double'"):
                await worker.call("double", Number(1), float, deadline=60)
        await worker.stop()

    asyncio.run(body())


@pytest.mark.slow
def test_a_held_interpreter_lock_is_borne_for_a_while_only() -> None:
    async def body() -> None:
        worker = await started(silence_seconds=4)
        assert await worker.call("hold_lock", Number(2), str, deadline=60) == "let go"
        async with asyncio.timeout(15):
            with pytest.raises(WorkerStuck, match="does not beat"):
                await worker.call("hold_lock", Number(60), str, deadline=60)
        await worker.stop()

    asyncio.run(body())


@pytest.mark.slow
def test_a_node_that_stood_still_itself_blames_no_worker() -> None:
    async def body() -> None:
        worker = await started(silence_seconds=1.5)
        call = asyncio.create_task(worker.call("sleep", Number(3), str, deadline=60))
        await asyncio.sleep(0.2)
        time.sleep(2.5)
        assert await call == "slept"
        await worker.stop()

    asyncio.run(body())


def test_stop_tells_the_caller_who_still_waits(run) -> None:
    async def body() -> None:
        worker = await started()
        call = asyncio.create_task(worker.call("sleep", Number(60), str, deadline=60))
        await asyncio.sleep(0.1)
        await worker.stop(grace=0)
        async with asyncio.timeout(5):
            with pytest.raises(WorkerDied):
                await call

    run(body())


def test_a_late_answer_is_a_timeout_that_ends_the_worker(run) -> None:
    async def body() -> None:
        worker = await started()
        with pytest.raises(CallTimeout, match="'sleep' within 1 s"):
            await worker.call("sleep", Number(60), str, deadline=1)
        assert not worker.alive
        await worker.stop()

    run(body())


def test_a_cancelled_call_does_not_disturb_the_next(run) -> None:
    async def body() -> None:
        worker = await started()
        task = asyncio.create_task(worker.call("sleep", Number(0.5), str, deadline=5))
        await asyncio.sleep(0.1)
        task.cancel()
        assert await worker.call("double", Number(1), float, deadline=5) == 2.0
        await worker.stop()

    run(body())


GROUP_SIGNAL = """
import asyncio, os, signal, sys
sys.path.insert(0, {path!r})
from test_workers import *
async def body():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else lambda *_: None)
        worker = made()
        starting = asyncio.create_task(worker.start())
        while worker.pid is None:
            await asyncio.sleep(0)
        os.killpg(0, number)
        await starting
        assert await worker.call("double", Number(1), float, deadline=5) == 2.0
        await worker.stop()
asyncio.run(body())
"""


def test_a_signal_to_the_nodes_group_ends_no_child_not_even_one_that_just_begins() -> None:
    code = GROUP_SIGNAL.format(path=str(Path(__file__).parent))
    run = subprocess.run(
        [sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr


PARENT = """
import asyncio, sys
sys.path.insert(0, {path!r})
from test_workers import *
async def body():
    worker = await started()
    print(worker.pid, flush=True)
    await worker.call("sleep", Number(60), str, deadline=90)
asyncio.run(body())
"""


def test_no_orphan_after_kill_9_of_the_parent(tmp_path: Path) -> None:
    code = PARENT.format(path=str(Path(__file__).parent))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


# -- calls side by side ------------------------------------------------------------------------------------------------


async def started_async(**settings: float) -> Worker:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), ASYNC: "1"}
    worker = Worker("test", __name__, env=env, **{"start_seconds": 20, "calls_at_once": 4, **settings})  # type: ignore[arg-type]
    await worker.start()
    return worker


def test_calls_run_side_by_side_in_a_worker_that_serves_asynchronously(run) -> None:
    async def body() -> None:
        worker = await started_async()
        calls = [worker.call("meet", Number(3), str, deadline=5) for _ in range(3)]
        assert await asyncio.gather(*calls) == ["met"] * 3
        await worker.stop()

    run(body())


def test_every_call_gets_its_own_answer(run) -> None:
    async def body() -> None:
        worker = await started_async()
        results = await asyncio.gather(*(worker.call("double_later", Number(i), float, deadline=5) for i in range(50)))
        assert results == [2.0 * i for i in range(50)]
        await worker.stop()

    run(body())


def test_no_more_calls_run_at_once_than_allowed(run) -> None:
    async def body() -> None:
        worker = await started_async(calls_at_once=2)
        assert max(await asyncio.gather(*(worker.call("count", Number(0.05), int, deadline=5) for _ in range(6)))) == 2
        await worker.stop()

    run(body())


def test_a_call_that_fails_takes_no_other_with_it(run) -> None:
    async def body() -> None:
        worker = await started_async()
        meeting = asyncio.create_task(worker.call("meet", Number(2), str, deadline=5))
        with pytest.raises(CallFailed, match=r"ValueError: no 3\.0 at .*test_workers\.py:\d+"):
            await worker.call("fail_later", Number(3), float, deadline=5)
        assert not meeting.done()
        assert await worker.call("meet", Number(2), str, deadline=5) == await meeting == "met"
        await worker.stop()

    run(body())


def test_an_interrupted_call_fails_and_the_worker_goes_on(run) -> None:
    async def body() -> None:
        worker = await started_async()
        waiting = [asyncio.create_task(worker.call("wait", Number(60), str, deadline=90)) for _ in range(2)]
        await asyncio.sleep(0.2)
        assert await worker.call("interrupt", Number(0), int, deadline=5) == 2
        for call in waiting:
            with pytest.raises(CallFailed, match="interrupted"):
                await call
        assert await worker.call("double_later", Number(1), float, deadline=5) == 2.0
        await worker.stop()

    run(body())


@pytest.mark.parametrize("grace", [0, 5])
def test_stop_ends_calls_that_still_run(run, grace: float) -> None:
    async def body() -> None:
        worker = await started_async()
        waiting = [asyncio.create_task(worker.call("wait", Number(60), str, deadline=90)) for _ in range(3)]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await worker.stop(grace)
        assert time.monotonic() - began < 4
        for call in waiting:
            with pytest.raises(WorkerError):
                await call
        assert not worker.alive

    run(body())


def test_a_death_ends_all_calls_that_run_with_the_same_reason(run) -> None:
    async def body() -> None:
        worker = await started_async()
        waiting = [asyncio.create_task(worker.call("wait", Number(60), str, deadline=90)) for _ in range(2)]
        waiting.append(asyncio.create_task(worker.call("die_later", Number(0), str, deadline=5)))
        for call in waiting:
            with pytest.raises(WorkerDied, match=r"(?s)exit code 7.*last words"):
                await call
        await worker.stop()

    run(body())


async def spawned(worker: Worker) -> tuple[set[int], Path]:
    """What the worker and its child are, and the shared memory between them."""
    *pids, name = await worker.call("spawn", Number(0), list[str], deadline=20)
    assert len(pids) == 2  # the child and multiprocessing's resource tracker
    return {worker.pid or 0, *map(int, pids)}, Path("/dev/shm") / name


def check_gone(pids: set[int], memory: Path) -> None:
    assert wait_gone(pids) == set()
    assert not memory.exists()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_what_a_worker_has_spawned_ends_with_it_and_leaves_no_shared_memory(run, how: str) -> None:
    async def body() -> None:
        worker = await started_async()
        pids, memory = await spawned(worker)
        assert alive(pids) == pids
        assert memory.exists()
        if how == "kill":
            os.kill(worker.pid or 0, signal.SIGKILL)
            while worker.alive:
                await asyncio.sleep(0.01)
        await worker.stop(grace=0)
        check_gone(pids, memory)

    run(body())


SPAWNING_PARENT = """
import asyncio, sys
sys.path.insert(0, {path!r})
from test_workers import *
async def body():
    worker = await started_async()
    pids, memory = await spawned(worker)
    print(memory, *pids, flush=True)
    await worker.call("wait", Number(60), str, deadline=90)
asyncio.run(body())
"""


def test_kill_9_of_the_parent_ends_what_its_worker_has_spawned() -> None:
    code = SPAWNING_PARENT.format(path=str(Path(__file__).parent))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    memory, *pids = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pids) == 3
    check_gone(set(map(int, pids)), Path(memory))


def test_a_start_waits_until_a_stop_is_over_and_is_not_disturbed_by_it(run) -> None:
    async def body() -> None:
        worker = await started_async()
        first = worker.pid
        stopping = asyncio.create_task(worker.stop(grace=5))
        await asyncio.sleep(0)
        assert not worker.alive  # nobody may give it work from here on
        with pytest.raises(WorkerDied):
            await worker.call("double_later", Number(1), float, deadline=5)
        await worker.start()
        assert stopping.done()
        assert worker.pid != first
        assert await worker.call("double_later", Number(1), float, deadline=5) == 2.0
        await worker.stop()

    run(body())


def test_a_worker_that_was_killed_for_a_late_answer_can_be_started_by_another_caller_at_once(run) -> None:
    async def body() -> None:
        worker = await started_async()
        late = asyncio.create_task(worker.call("wait", Number(60), str, deadline=0.5))
        with pytest.raises(CallTimeout):
            await worker.call("wait", Number(60), str, deadline=20)  # ends with the other's fault, while that kills
        await worker.start()
        with pytest.raises(CallTimeout):
            await late
        assert await worker.call("double_later", Number(1), float, deadline=5) == 2.0
        await worker.stop()

    run(body())
