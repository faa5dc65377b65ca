"""The scorer worker: generates questions and judges answers inside the sandbox.

Order matters: import everything, lock the process away (`sandbox.enter`), then serve. From there on whatever an answer
does happens in here. Two deadlines: a timer in this process raises in the middle of a slow answer; where that cannot
work (a loop in C), the node kills the process.

A reply may be partial: the worker stops after a fault, or when its time for one call is over, and the pool asks for
the rest. So no call takes longer than about three times the deadline of an answer.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Final, TypeVar

from msgspec import Struct, structs

from sapo_node import workers
from sapo_node.tasks.base import AnswerForm, TaskRefused, TaskSpec, answer_digest, reward_in_form
from sapo_node.tasks.catalog import validate_spec
from sapo_node.tasks.sandbox import Protection, enter
from sapo_node.tasks.verifiers import VERIFIERS, Verifier

T = TypeVar("T")

Grade = Callable[[str, AnswerForm], float]
"""The reward of a completion, if it is in that form."""

_AGAIN_SECONDS: Final = 0.2
"""The timer fires again after this: a bare `except` in a scorer swallows the first exception."""

COSTLY_CPU_SECONDS: Final = 0.2
"""Computing time from which work that ran out of time is itself to blame. With less, the machine was busy elsewhere.
Answers to the offered tasks take less than 0.05 s; a node that trains may leave a scorer a quarter of a core."""


class Fault(Struct, frozen=True):
    """Why this process should be replaced, and whether what it was asked is to blame for certain."""

    text: str
    costly: bool


class Draw(Struct, frozen=True):
    """Coordinates of a question."""

    spec: TaskSpec
    seed: int


class DrawRequest(Struct, frozen=True, kw_only=True):
    """Questions to generate, and the deadline for each (seconds)."""

    draws: list[Draw]
    seconds: float


class Drawn(Struct, frozen=True, kw_only=True):
    """A question's text, or why there is none; and `answer_digest` of a generated question's truth."""

    text: str | None = None
    refused: str = ""
    truth: bytes = b""


class DrawReply(Struct, frozen=True, kw_only=True):
    """The first questions of a request, at least one; with a `fault` the last one is its cause."""

    drawn: list[Drawn]
    fault: Fault | None = None


class JudgeRequest(Struct, frozen=True, kw_only=True):
    """Answers to one generated question, the form they need, the deadline for each and that for the question
    (seconds)."""

    draw: Draw
    texts: list[str]
    form: AnswerForm
    seconds: float
    draw_seconds: float


class RowRequest(Struct, frozen=True, kw_only=True):
    """Answers to one row of a data set, the form they need, and the deadline for each (seconds)."""

    truth: str
    verifier: Verifier
    texts: list[str]
    form: AnswerForm
    seconds: float


class JudgeReply(Struct, frozen=True, kw_only=True):
    """The question and the rewards of the first answers. With a `fault` the last reward belongs to its cause; without
    rewards the question does."""

    drawn: Drawn
    rewards: list[float]
    fault: Fault | None = None
    cpu: float = 0.0  # seconds of computing


class AboutRequest(Struct, frozen=True):
    """Asks what surrounds the worker."""


class OutOfTime(BaseException):
    """Raised by the timer. No Exception, so that a scorer's `except Exception` does not take it for its own."""


class TooMuch(Exception):
    """Work was given up for its time or its memory."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault


def within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """The result of `work`. Raises TooMuch in the middle of it when it takes longer than `seconds`, or when memory runs
    out; `what` names it there."""
    running = True

    def ring(_signal: int, _frame: FrameType | None) -> None:
        if running:
            raise OutOfTime

    began = time.process_time()
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        try:
            return work()
        finally:
            running = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        costly = time.process_time() - began >= COSTLY_CPU_SECONDS
        raise TooMuch(Fault(f"{what} took longer than {seconds:g} s", costly)) from None
    except MemoryError:
        raise TooMuch(Fault(f"{what} ran out of memory", True)) from None


def draw(request: DrawRequest) -> DrawReply:
    """Generate questions until all are made, one faults, or the time is over."""
    drawn: list[Drawn] = []
    end = time.monotonic() + request.seconds
    for wanted in request.draws:
        _, one, fault = _generate(wanted, request.seconds)
        drawn.append(one)
        if fault or time.monotonic() > end:
            return DrawReply(drawn=drawn, fault=fault)
    return DrawReply(drawn=drawn)


def judge(request: JudgeRequest) -> JudgeReply:
    """Generate the question and judge answers to it, strictly."""
    began = time.process_time()
    grade, drawn, fault = _generate(request.draw, request.draw_seconds)
    if grade is None:
        return JudgeReply(drawn=drawn, rewards=[], fault=fault, cpu=time.process_time() - began)
    reply = _judge(grade, drawn, request)
    return structs.replace(reply, cpu=time.process_time() - began)


def judge_row(request: RowRequest) -> JudgeReply:
    """Judge answers to a row of a data set."""
    verifier = VERIFIERS[request.verifier]

    def grade(text: str, form: AnswerForm) -> float:
        return reward_in_form(text, form, request.truth, lambda answer: float(verifier(answer, request.truth)))

    return _judge(grade, Drawn(), request)


def _generate(wanted: Draw, seconds: float) -> tuple[Grade | None, Drawn, Fault | None]:
    """(how to grade an answer, the question, fault); no grader where there is no question."""
    from sapo_node.tasks import reasoning_gym as gym  # imported by `main`; at the top the node would import it too

    spec = wanted.spec
    what = f"{spec.name} with seed {wanted.seed}"
    try:
        validate_spec(spec)
        dataset = within(seconds, what, lambda: gym.open_dataset(spec.name, spec.config, wanted.seed))
        made = within(seconds, what, lambda: gym.entry(dataset, spec.name, wanted.seed))
    except TaskRefused as error:
        return None, Drawn(refused=str(error)), None
    except TooMuch as error:
        return None, Drawn(refused=error.fault.text), error.fault
    drawn = Drawn(text=made["question"], truth=answer_digest(gym.plain_truth(spec.name, made)))
    return partial(gym.reward, dataset, spec.name, made), drawn, None


def _judge(grade: Grade, drawn: Drawn, request: JudgeRequest | RowRequest) -> JudgeReply:
    rewards: list[float] = []
    end = time.monotonic() + request.seconds
    for text in request.texts:
        try:
            rewards.append(within(request.seconds, "an answer", lambda text=text: grade(text, request.form)))  # type: ignore[misc]
        except TooMuch as error:
            return JudgeReply(drawn=drawn, rewards=[*rewards, 0.0], fault=error.fault)
        if time.monotonic() > end:
            break
    return JudgeReply(drawn=drawn, rewards=rewards)


def main() -> None:
    """Import, lock away, serve."""
    workers.stage("importing reasoning_gym")
    os.environ["MPLCONFIGDIR"] = tempfile.gettempdir()  # matplotlib, which the library imports, writes there
    from sapo_node.tasks import reasoning_gym  # noqa: F401 - here: the imports write and fork, which ends below

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for good: some generators print
    protection = enter()
    for layer in protection.missing:
        print(f"sandbox: {layer}", file=sys.stderr, flush=True)

    def about(_: AboutRequest) -> Protection:
        return protection

    workers.serve({"draw": draw, "judge": judge, "judge_row": judge_row, "about": about})
