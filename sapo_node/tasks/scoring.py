"""The node's side of scoring: a small pool of sandboxed worker processes that generate questions and judge answers.

Rewards are strict: 1.0 if the completion is in the form that the node asks for and the task's own scorer gives full
marks to the extracted answer, else 0.0. The truth never leaves the workers. What surrounds a worker, and what that does
not cover, is told in `sandbox.py`.

An answer that hangs, takes too much memory or kills its worker scores 0.0 and costs that worker: the next one starts
fresh, and the other answers of the same job are judged all the same. When a job has lost MAX_FAULTS workers its
remaining answers score 0.0 unseen.

Strangers' jobs are *strict*: the first answer that costs a worker ends the job with `CostlyGroup`, so that its sender
can be blamed. They have less time an answer, and one call of theirs at a time stands in the queue: a job of this node
waits for no more than that one.
"""

import asyncio
import contextlib
import os
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from sapo_node.swarm.protocol import digest
from sapo_node.tasks.base import (
    DIGEST_BYTES,
    MAX_EVAL_QUESTIONS,
    AnswerForm,
    Judged,
    Question,
    TaskRefused,
    TaskSpec,
    answer_digest,
    is_eval_question,
    question_sha256,
)
from sapo_node.tasks.catalog import validate_spec
from sapo_node.tasks.sandbox import Protection
from sapo_node.tasks.scorer_worker import (
    AboutRequest,
    Draw,
    Drawn,
    DrawReply,
    DrawRequest,
    Fault,
    JudgeReply,
    JudgeRequest,
    RowRequest,
)
from sapo_node.tasks.verifiers import Verifier
from sapo_node.workers import CallFailed, Worker, WorkerError

A = TypeVar("A")
R = TypeVar("R")
Reply = TypeVar("Reply", DrawReply, JudgeReply)

MAX_FAULTS: Final = 3
"""Workers that one job may cost. Honest answers rarely cost any."""

STRICT_SECONDS: Final = 1.0
"""Deadline for a stranger's answer, if not less is set for this node's own. Honest ones take less than 0.05 s."""

MAX_TOGETHER: Final = 64
"""Questions or answers sent to a worker in one call."""

START_ATTEMPTS: Final = 3
START_SECONDS: Final = 60.0
START_BACKOFF_SECONDS: Final = 0.5

GRACE_SECONDS: Final = 1.0
"""A call may take this much longer than its worker's own deadlines add up to, before the worker is killed."""

MAX_CPU_SECONDS: Final = 3600.0
"""No call takes as long; a worker that says so was taken over."""

EVAL_TRIES: Final = 100
"""Seeds tried for each evaluation question wanted; about one question in ten belongs to evaluation."""

_MODULE = "sapo_node.tasks.scorer_worker"

# Of the node's environment a worker sees only these; secrets and settings stay out.
_PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_SET = {
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",  # names of weekdays follow the locale
    "PYTHONHASHSEED": "0",  # the tasks offered do not depend on it; should one do all the same, nodes still agree
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",  # no thread may run before the sandbox is entered
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class ScorersFailed(WorkerError):
    """No scorer worker can be had: they do not start."""


class CostlyGroup(WorkerError):
    """An answer or the question of a strict job ran out of time or memory by its own doing, or lost two workers."""


class Nonsense(WorkerError):
    """A worker's reply does not fit what it was asked. Answers run in there: one may have taken it over."""


class _Slot(Struct, eq=False):
    worker: Worker
    fresh: bool = False  # False: (re)start it before the next use


class _Part(Struct, Generic[R]):
    """Results of the first items of a call, and what went wrong with the last of them."""

    results: list[R]
    fault: Fault | None


class ScorerPool:
    """Scorer workers and the queue before them. Methods may be called concurrently, by any number of callers: the queue
    holds a caller's turn and nothing else, and the callers are of this node, bounded by its settings.

    `answer_seconds` is the deadline for an answer and for a question; completions in another form than `form` score 0;
    `module` is another worker's, for tests.
    `faults` counts lost workers, `restarts` the starts that replaced them, `last_fault` tells of the newest.
    """

    def __init__(self, workers: int, answer_seconds: float, form: AnswerForm = "any", *, module: str = _MODULE) -> None:
        self.faults = 0
        self.restarts = 0
        self.last_fault = ""
        self.protection: Protection | None = None
        self._seconds = answer_seconds
        self._form = form
        self._slots = [
            _Slot(Worker(f"scorer {n}", module, env=_environment(), start_seconds=START_SECONDS))
            for n in range(workers)
        ]
        self._idle: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        self._strict_turn = asyncio.Semaphore(1)

    @property
    def missing_protection(self) -> list[str]:
        """Layers of the sandbox that could not be put up, for people; known once `start` has returned."""
        return [] if self.protection is None else self.protection.missing

    async def start(self) -> None:
        """Start all workers. Raises ScorersFailed with the reason when one does not start."""
        await asyncio.gather(*(self._restart(slot) for slot in self._slots))
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(slot.worker.stop(grace=1.0) for slot in self._slots))

    async def question(self, spec: TaskSpec, seed: int) -> Question:
        """The question of these coordinates. Raises TaskRefused when there is none, and the reason is for people."""
        [found] = await self.questions([(spec, seed)])
        if isinstance(found, TaskRefused):
            raise found
        return found

    async def questions(self, wanted: Sequence[tuple[TaskSpec, int]]) -> list[Question | TaskRefused]:
        """Many questions in few calls, in the order of `wanted`; where there is none, the reason in its place."""

        async def ask(part: list[Draw]) -> _Part[Question | TaskRefused]:
            reply = await self._call("draw", DrawRequest(draws=part, seconds=self._seconds), DrawReply, len(part))
            return _Part([_question(drawn) for drawn in reply.drawn], reply.fault)

        draws = [Draw(spec, seed) for spec, seed in wanted]
        return await self._in_parts(draws, ask, lambda: TaskRefused(f"not generated: {self.last_fault}"))

    async def judge(self, spec: TaskSpec, seed: int, texts: list[str], *, strict: bool = False) -> Judged:
        """Generate the question again and judge completions to it.

        Raises TaskRefused when there is no question. A strict job raises CostlyGroup at the first fault that is the
        group's own, and another WorkerError at one that may be this machine's.
        """
        known: Question | None = None
        truth, cpu = b"", 0.0

        async def ask(part: list[str]) -> _Part[float]:
            nonlocal known, truth, cpu
            request = JudgeRequest(
                draw=Draw(spec, seed),
                texts=part,
                form=self._form,
                seconds=self._answer_seconds(strict),
                draw_seconds=self._seconds,
            )
            reply = await self._call("judge", request, JudgeReply, len(part), strict)
            found = _question(reply.drawn)
            cpu += reply.cpu
            if isinstance(found, TaskRefused):
                if reply.fault:
                    self._note_fault(reply.fault.text)
                    if strict:  # another machine may have had the time: nothing says that there is no question
                        raise (CostlyGroup if reply.fault.costly else WorkerError)(reply.fault.text)
                found.cpu = cpu
                raise found
            known, truth = found, reply.drawn.truth
            return _Part(reply.rewards, reply.fault)

        rewards = await self._in_parts(texts, ask, lambda: 0.0, strict)
        return Judged(question=known or await self.question(spec, seed), rewards=rewards, truth=truth, cpu=cpu)

    async def judge_row(
        self, question: str, answer: str, verifier: Verifier, texts: list[str], *, strict: bool = False
    ) -> Judged:
        """Judge completions to a row of a data set. Strict as in `judge`."""

        async def ask(part: list[str]) -> _Part[float]:
            seconds = self._answer_seconds(strict)
            request = RowRequest(truth=answer, verifier=verifier, texts=part, form=self._form, seconds=seconds)
            reply = await self._call("judge_row", request, JudgeReply, len(part), strict)
            return _Part(reply.rewards, reply.fault)

        rewards = await self._in_parts(texts, ask, lambda: 0.0, strict)
        asked = Question(text=question, sha256=question_sha256(question))
        return Judged(question=asked, rewards=rewards, truth=answer_digest(answer))

    async def eval_questions(self, spec: TaskSpec, want: int) -> list[tuple[int, Question]]:
        """Up to `want` distinct evaluation questions of a task with their seeds: the same list on every node.

        Fewer where the task has no more; `base.MIN_EVAL_QUESTIONS` says how few are too few. Raises TaskRefused for a
        task that is not offered.
        """
        validate_spec(spec)
        found: dict[bytes, tuple[int, Question]] = {}
        for start in range(0, EVAL_TRIES * want, MAX_TOGETHER):
            stop = min(start + MAX_TOGETHER, EVAL_TRIES * want)
            seeds = [eval_seed(spec, i) for i in range(start, stop)]
            for seed, question in zip(seeds, await self.questions([(spec, seed) for seed in seeds]), strict=True):
                if isinstance(question, Question) and is_eval_question(question.sha256):
                    found.setdefault(question.sha256, (seed, question))
                    if len(found) == want:
                        return list(found.values())
        return list(found.values())

    def _answer_seconds(self, strict: bool) -> float:
        return min(self._seconds, STRICT_SECONDS) if strict else self._seconds

    async def _in_parts(
        self,
        items: list[A],
        ask: Callable[[list[A]], Awaitable[_Part[R]]],
        lost: Callable[[], R],
        strict: bool = False,
    ) -> list[R]:
        """A result for each item. `ask` answers a beginning of what it is given, at least one, and names a fault.

        When a worker is lost nobody knows by which item, or whether by any. From then on they are asked for one at a
        time, and the one that loses a worker again is the culprit.
        """
        results: list[R] = []
        faults, alone = 0, False
        while len(results) < len(items) and faults < MAX_FAULTS:
            part = items[len(results) : len(results) + (1 if alone else MAX_TOGETHER)]
            try:
                answered = await ask(part)
            except (ScorersFailed, CostlyGroup):
                raise
            except WorkerError as error:
                self._note_fault(str(error))
                if strict and isinstance(error, CallFailed):
                    raise  # the worker lives and has a bug
                if strict and alone:
                    raise CostlyGroup(str(error)) from error
                faults += 1
                if alone:
                    results.append(lost())
                alone = not alone
                continue
            results += answered.results
            if answered.fault:
                self._note_fault(answered.fault.text)
                if strict:
                    raise (CostlyGroup if answered.fault.costly else WorkerError)(answered.fault.text)
                faults, alone = faults + 1, False
        return results + [lost() for _ in range(len(items) - len(results))]

    def _note_fault(self, fault: str) -> None:
        self.faults += 1
        self.last_fault = fault

    async def _call(self, method: str, request: Struct, result: type[Reply], asked: int, strict: bool = False) -> Reply:
        async with self._strict_turn if strict else contextlib.nullcontext(), self._borrowed() as slot:
            slot.fresh = False  # unless it answers well: a call that fails or is cancelled leaves it in any state
            # To generate, the call's time, and an answer begun at its end.
            deadline = self._seconds + 2 * self._answer_seconds(strict) + GRACE_SECONDS
            try:
                reply = await slot.worker.call(method, request, result, deadline=deadline)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                reply = None
            if reply is None or not _fits(reply, asked):
                raise Nonsense(f"{slot.worker.name} gave a reply to {method!r} that does not fit what it was asked")
            slot.fresh = reply.fault is None
            return reply

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[_Slot]:
        slot = await self._idle.get()
        try:
            if not (slot.fresh and slot.worker.alive):
                await self._restart(slot)
                self.restarts += 1
            yield slot
        finally:
            self._idle.put_nowait(slot)

    async def _restart(self, slot: _Slot) -> None:
        for attempt in range(START_ATTEMPTS):
            try:
                await slot.worker.stop(grace=0.0)
                await slot.worker.start()
                self.protection = await slot.worker.call("about", AboutRequest(), Protection, deadline=START_SECONDS)
                slot.fresh = True
                return
            except WorkerError as error:
                reason = error
                if attempt < START_ATTEMPTS - 1:
                    await asyncio.sleep(START_BACKOFF_SECONDS * 2**attempt)
        raise ScorersFailed(f"a scorer worker did not start in {START_ATTEMPTS} attempts: {reason}") from reason


def eval_seed(spec: TaskSpec, i: int) -> int:
    """The i-th seed (31 bits) looked at for evaluation questions of a task; the same on every node."""
    return _eval_seed(spec.name.encode(), spec.config_hash, i)


def _eval_seed(name: bytes, config_hash: bytes, i: int) -> int:
    parts = (name, config_hash, i.to_bytes(4, "big"))
    return int.from_bytes(digest(b"sapo/1/eval", *parts)[:4], "big") & 0x7FFFFFFF


class EvalSeeds:
    """Every seed that evaluation may look at, of a task with some settings: 40 kB each."""

    def __init__(self, specs: Iterable[TaskSpec]) -> None:
        named = [(spec.name.encode(), spec.config_hash) for spec in specs]
        seeds = (_eval_seed(*task, i) for task in named for i in range(EVAL_TRIES * MAX_EVAL_QUESTIONS))
        self._sorted = array("I", sorted(seeds))

    def __contains__(self, seed: int) -> bool:
        at = bisect_left(self._sorted, seed)
        return at < len(self._sorted) and self._sorted[at] == seed


def _fits(reply: DrawReply | JudgeReply, asked: int) -> bool:
    """Whether a reply holds results for a beginning of the items asked for, none only where there is no question."""
    if isinstance(reply, DrawReply):
        return 1 <= len(reply.drawn) <= asked
    if len(reply.drawn.truth) not in (0, DIGEST_BYTES):
        return False
    if not 0.0 <= reply.cpu <= MAX_CPU_SECONDS:  # NaN is not either
        return False
    least = 0 if reply.drawn.text is None and reply.drawn.refused else min(1, asked)
    return least <= len(reply.rewards) <= asked and set(reply.rewards) <= {0.0, 1.0}


def _question(drawn: Drawn) -> Question | TaskRefused:
    if drawn.text is None:
        return TaskRefused(drawn.refused)
    return Question(text=drawn.text, sha256=question_sha256(drawn.text))


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED if name in os.environ} | _SET
