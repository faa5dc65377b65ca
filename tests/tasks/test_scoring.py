"""The scorer pool with real workers: what it answers, and what it survives."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar, get_args

import pytest

from sapo_node.tasks import scoring
from sapo_node.tasks.base import (
    AnswerForm,
    Judged,
    Question,
    TaskRefused,
    answer_digest,
    has_form,
    is_eval_question,
    question_sha256,
)
from sapo_node.tasks.scoring import CostlyGroup, ScorerPool, eval_seed
from sapo_node.workers import WorkerError
from tests.tasks.specs import spec

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

GCD = spec("gcd")
GCD_TRUTH = "8"  # of seed 5; test_questions pins its question
MATRIX = spec("binary_matrix", min_n=2, max_n=2)
MATRIX_TRUTH = "2 1\n1 0"  # of seed 5

# Answers to binary_matrix, whose scorer evaluates them where no filter stands before it.
HANGS = "all(True for _ in iter(int, 1))"  # Python: the timer ends it
HANGS_IN_C = "sum(range(10**12))"  # C, with the lock held: only a kill ends it
SWALLOWS = "bytearray(1 << 31)"
DIES = "__import__('os')._exit(3)"


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def pool(run: Run[Any]) -> Iterator[ScorerPool]:
    made = ScorerPool(2, answer_seconds=5.0)
    run(made.start())
    yield made
    run(made.close())


@pytest.fixture(scope="module")
def unguarded(run: Run[Any]) -> Iterator[ScorerPool]:
    """A pool in which hostile answers reach the scorers that evaluate them."""
    made = ScorerPool(1, answer_seconds=1.0, module="tests.tasks.unguarded_worker")
    run(made.start())
    yield made
    run(made.close())


def test_a_verdict_has_the_digest_of_the_questions_own_truth(pool: ScorerPool, run: Run[Any]) -> None:
    assert run(pool.judge(GCD, 5, ["4"])).truth == answer_digest(f" {GCD_TRUTH}\n")
    assert run(pool.judge_row("Which?", "B", "choice", ["b"])).truth == answer_digest("b")


def test_a_question_is_the_pinned_one(pool: ScorerPool, run: Run[Any]) -> None:
    question = run(pool.question(GCD, 5))
    assert question.text.startswith("Find the Greatest Common Divisor (GCD) of these numbers: 760, 368.")
    assert question.sha256 == question_sha256(question.text)


def test_all_layers_of_the_sandbox_are_up(pool: ScorerPool) -> None:
    if sys.platform != "linux":
        pytest.skip("the sandbox needs Linux")
    assert pool.protection is not None
    assert pool.protection.missing == []


def test_judging_is_strict_and_keeps_the_order(pool: ScorerPool, run: Run[Any]) -> None:
    texts = ["<answer>8</answer>", "8", "<answer>8</answer> no, <answer>4</answer>", "08", "", "8 or 4", "NaN"]
    judged = run(pool.judge(GCD, 5, texts))
    assert judged.rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert judged.question == run(pool.question(GCD, 5))


@pytest.mark.parametrize(
    ("text", "bare", "tags"),
    [
        ("8", True, False),
        (" 8", False, False),
        ("8\n", False, False),
        ("", True, False),
        ("it is 8", True, False),  # a form says nothing about what is in it
        ("<answer>8</answer>", False, True),
        ("so it is <answer> 8 </answer>", False, True),
        ("<answer>8</answer>.", False, False),
        ("<answer>4</answer> no, <answer>8</answer>", False, False),
        ("</answer>8<answer>", True, False),
        ("<answer><answer>8</answer>", False, False),
        ("8</answer>", True, False),
    ],
)
def test_forms_of_answers(text: str, bare: bool, tags: bool) -> None:
    assert [has_form(text, form) for form in get_args(AnswerForm)] == [True, tags, bare, bare]


@pytest.mark.parametrize(
    ("form", "expected", "spelt"),
    [
        ("any", [1, 1, 1, 0], [1, 1, 1]),
        ("tags", [0, 0, 1, 0], [0, 0, 0]),
        ("bare", [1, 0, 0, 0], [1, 1, 1]),
        ("exact", [1, 0, 0, 0], [1, 0, 0]),
    ],
)
def test_a_right_answer_in_another_form_earns_nothing(
    form: AnswerForm, expected: list[float], spelt: list[float], run: Run[Any]
) -> None:
    texts = ["8", " 8", "<answer>8</answer>", "9"]

    async def judged() -> list[Judged]:
        pool = ScorerPool(1, 5.0, form)
        await pool.start()
        try:
            return [
                await pool.judge(GCD, 5, texts),
                await pool.judge_row("Four and four?", "8", "numeric", texts),
                await pool.judge(
                    spec("fraction_simplification", styles=["plain"]), 0, ["79/173", "79 / 173", "079/173"]
                ),
                await pool.judge_row("A half?", "0.5", "numeric", ["0.5", "0.50", ".5"]),
            ]
        finally:
            await pool.close()

    question, row, fraction, half = run(judged())
    assert (question.rewards, row.rewards) == (expected, expected)
    assert (fraction.rewards, half.rewards) == (spelt, spelt)
    assert question.truth == answer_digest(GCD_TRUTH)


def test_more_answers_than_go_into_one_call(pool: ScorerPool, run: Run[Any]) -> None:
    texts = [str(n % 10) for n in range(3 * scoring.MAX_TOGETHER + 7)]
    assert run(pool.judge(GCD, 5, texts)).rewards == [float(text == GCD_TRUTH) for text in texts]


def test_no_answers_give_the_question_alone(pool: ScorerPool, run: Run[Any]) -> None:
    judged = run(pool.judge(GCD, 5, []))
    assert judged.rewards == []
    assert "760, 368" in judged.question.text


def test_many_jobs_at_once(pool: ScorerPool, run: Run[Any]) -> None:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(pool.judge(GCD, seed, ["1", "2", "4", "8"]) for seed in range(40)))

    together = run(all_of_them())
    apart = [run(pool.judge(GCD, seed, ["1", "2", "4", "8"])) for seed in range(40)]
    assert [(one.question, one.rewards) for one in together] == [(one.question, one.rewards) for one in apart]
    assert sum(sum(judged.rewards) for judged in together) > 20


def test_rows_of_a_data_set(pool: ScorerPool, run: Run[Any]) -> None:
    judged = run(pool.judge_row("1000 + 234?", "1234", "numeric", ["<answer>1,234</answer>", "1235", "x"]))
    assert judged.rewards == [1.0, 0.0, 0.0]
    assert judged.question.sha256 == question_sha256("1000 + 234?")


def test_a_refused_task_is_told_and_costs_no_worker(pool: ScorerPool, run: Run[Any]) -> None:
    before = pool.restarts
    with pytest.raises(TaskRefused, match="max_n must be a whole number from 2 to 24"):
        run(pool.judge(spec("binary_matrix", max_n=3000), 1, ["x"]))
    with pytest.raises(TaskRefused, match="word_ladder cannot be used"):
        run(pool.question(spec("word_ladder"), 1))
    assert pool.restarts == before


def test_many_questions_keep_their_places(pool: ScorerPool, run: Run[Any]) -> None:
    wanted = [(GCD, 5), (spec("acre"), 1), *((spec("chain_sum"), seed) for seed in range(100))]
    found = run(pool.questions(wanted))
    assert found[0] == run(pool.question(GCD, 5))
    assert isinstance(found[1], TaskRefused)
    assert found[-1] == run(pool.question(spec("chain_sum"), 99))
    assert len(found) == len(wanted)


def test_evaluation_questions_are_fixed_distinct_and_held_out(pool: ScorerPool, run: Run[Any]) -> None:
    listed = run(pool.eval_questions(GCD, 40))
    assert listed[:32] == run(pool.eval_questions(GCD, 32))
    assert len({question.sha256 for _, question in listed}) == 40
    assert all(is_eval_question(question.sha256) for _, question in listed)
    assert [seed for seed, _ in listed[:2]] == [
        seed
        for seed in (eval_seed(GCD, i) for i in range(100))
        if is_eval_question(run(pool.question(GCD, seed)).sha256)
    ][:2]
    assert listed[0][0] == 1282053255  # another one, and nodes evaluate on each other's training questions


def test_a_task_with_few_questions_yields_what_it_has(pool: ScorerPool, run: Run[Any]) -> None:
    few = spec("base_conversion", min_base=2, max_base=3, min_value=0, max_value=20)
    assert 0 < len(run(pool.eval_questions(few, 20))) < 15  # 42 questions in all


def test_a_worker_killed_between_jobs_is_replaced(pool: ScorerPool, run: Run[Any]) -> None:
    for slot in pool._slots:
        assert slot.worker.pid is not None
        os.kill(slot.worker.pid, signal.SIGKILL)
    assert isinstance(run(pool.question(GCD, 5)), Question)


def test_a_worker_killed_in_a_job_costs_no_answer(unguarded: ScorerPool, run: Run[Any]) -> None:
    async def judge_and_kill() -> Any:
        job = asyncio.create_task(unguarded.judge(MATRIX, 5, ["__import__('time').sleep(0.5)", MATRIX_TRUTH]))
        await asyncio.sleep(0.2)
        pid = unguarded._slots[0].worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return await job

    assert run(judge_and_kill()).rewards == [0.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [HANGS, SWALLOWS, DIES])
def test_a_hostile_answer_scores_nothing_and_the_others_are_judged(
    unguarded: ScorerPool, run: Run[Any], hostile: str
) -> None:
    started = time.monotonic()
    judged = run(unguarded.judge(MATRIX, 5, [MATRIX_TRUTH, hostile, MATRIX_TRUTH, "x"]))
    assert judged.rewards == [1.0, 0.0, 1.0, 0.0]
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_an_answer_that_no_timer_can_end_is_killed(unguarded: ScorerPool, run: Run[Any]) -> None:
    before = unguarded.faults
    assert run(unguarded.judge(MATRIX, 5, [MATRIX_TRUTH, HANGS_IN_C, MATRIX_TRUTH])).rewards == [1.0, 0.0, 1.0]
    assert unguarded.faults == before + 2  # once together with the others, once alone
    assert "did not answer 'judge' within 4 s" in unguarded.last_fault


@pytest.mark.slow
def test_a_fault_costs_the_worker(unguarded: ScorerPool, run: Run[Any]) -> None:
    run(unguarded.judge(MATRIX, 5, ["x"]))
    pid = unguarded._slots[0].worker.pid
    run(unguarded.judge(MATRIX, 5, [HANGS]))
    run(unguarded.judge(MATRIX, 5, ["x"]))
    assert unguarded._slots[0].worker.pid != pid
    assert unguarded.last_fault == "an answer took longer than 1 s"


@pytest.mark.slow
def test_one_job_costs_few_workers(unguarded: ScorerPool, run: Run[Any]) -> None:
    before = unguarded.faults
    judged = run(unguarded.judge(MATRIX, 5, [HANGS] * 60 + [MATRIX_TRUTH]))
    assert judged.rewards == [0.0] * 61
    assert unguarded.faults == before + scoring.MAX_FAULTS


@pytest.mark.slow
def test_a_cancelled_job_leaves_the_pool_usable(unguarded: ScorerPool, run: Run[Any]) -> None:
    async def cancel() -> None:
        async with asyncio.timeout(0.2):
            await unguarded.judge(MATRIX, 5, ["__import__('time').sleep(0.9)"])

    with pytest.raises(TimeoutError):
        run(cancel())
    assert run(unguarded.judge(MATRIX, 5, [MATRIX_TRUTH])).rewards == [1.0]


@pytest.mark.slow
def test_a_strict_job_ends_at_the_first_answer_that_takes_too_long(unguarded: ScorerPool, run: Run[Any]) -> None:
    before = unguarded.faults
    with pytest.raises(CostlyGroup, match="an answer took longer than 1 s"):
        run(unguarded.judge(MATRIX, 5, [MATRIX_TRUTH, *[HANGS] * 7], strict=True))
    assert unguarded.faults == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [DIES, HANGS_IN_C])
def test_a_strict_job_blames_an_answer_that_takes_the_worker_twice(
    unguarded: ScorerPool, run: Run[Any], hostile: str
) -> None:
    with pytest.raises(CostlyGroup):
        run(unguarded.judge(MATRIX, 5, [MATRIX_TRUTH, hostile], strict=True))


def test_a_worker_killed_from_outside_is_no_strict_jobs_fault(unguarded: ScorerPool, run: Run[Any]) -> None:
    async def judge_and_kill() -> Any:
        texts = ["__import__('time').sleep(0.5)", MATRIX_TRUTH]
        job = asyncio.create_task(unguarded.judge(MATRIX, 5, texts, strict=True))
        await asyncio.sleep(0.2)
        pid = unguarded._slots[0].worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return await job

    run(unguarded.question(GCD, 5))  # a fresh worker stands ready
    assert run(judge_and_kill()).rewards == [0.0, 1.0]


@pytest.mark.slow
def test_time_that_an_answer_did_not_compute_is_not_its_fault(unguarded: ScorerPool, run: Run[Any]) -> None:
    with pytest.raises(WorkerError, match="an answer took longer than 1 s") as told:
        run(unguarded.judge(MATRIX, 5, ["__import__('time').sleep(3)"], strict=True))
    assert not isinstance(told.value, CostlyGroup)


@pytest.mark.slow
def test_own_jobs_wait_for_one_call_of_strangers_at_most(unguarded: ScorerPool, run: Run[Any]) -> None:
    async def race() -> list[str]:
        done: list[str] = []

        async def job(name: str, text: str, strict: bool) -> None:
            await unguarded.judge(MATRIX, 5, [text], strict=strict)
            done.append(name)

        naps = [job("stranger", "__import__('time').sleep(0.3)", True) for _ in range(4)]
        strangers = [asyncio.create_task(nap) for nap in naps]
        await asyncio.sleep(0.05)
        await asyncio.gather(*(job("own", MATRIX_TRUTH, False) for _ in range(8)))
        found = list(done)
        await asyncio.gather(*strangers)
        return found

    run(unguarded.question(GCD, 5))  # a fresh worker stands ready
    assert run(race()) == ["stranger"] + ["own"] * 8


def test_as_many_jobs_as_a_round_may_have(pool: ScorerPool, run: Run[Any]) -> None:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(pool.judge(GCD, 5, [GCD_TRUTH]) for _ in range(1000)))

    assert all(judged.rewards == [1.0] for judged in run(all_of_them()))


def test_layers_that_are_missing_can_be_told_from_the_start(pool: ScorerPool, run: Run[Any]) -> None:
    if sys.platform != "linux":
        pytest.skip("the sandbox needs Linux")
    bare = ScorerPool(1, 1.0, module="tests.tasks.bare_worker")
    run(bare.start())
    missing = bare.missing_protection
    run(bare.close())
    assert missing == ["no seccomp filter (is libseccomp installed?): taken away"]
    assert pool.missing_protection == []


def test_workers_that_do_not_start_are_told_with_the_reason(run: Run[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "START_BACKOFF_SECONDS", 0.01)
    broken = ScorerPool(1, 1.0, module="tests.tasks.absent")
    with pytest.raises(WorkerError, match=r"(?s)did not start in 3 attempts.*No module named 'tests.tasks.absent'"):
        run(broken.start())
    run(broken.close())


def test_secrets_of_the_environment_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert "SECRET_TOKEN" not in scoring._environment()


@pytest.mark.slow
def test_speed_is_sane(pool: ScorerPool, run: Run[Any]) -> None:
    started = time.monotonic()
    for seed in range(100):
        run(pool.judge(GCD, seed, ["1"] * 8))
    assert time.monotonic() - started < 10  # 0.1 s on an idle machine
