"""Held-out scores: the fixed evaluation questions of each task of the mixture, asked with a fixed sampling seed.

The questions are the same for the whole swarm (tasks/base.py) and are never trained on. The sampling seed is fixed too,
so two evaluations of one policy are equal, and the difference between two policies is measured in pairs.
"""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Final

import click
import msgspec
from msgspec import Struct

from sapo_node.config import NodeConfig
from sapo_node.config_load import Loaded
from sapo_node.errors import SapoError
from sapo_node.inference.base import InferenceEngine, SamplingParams
from sapo_node.monitor.metrics import HASH_PREFIX, EvalRecord, QuestionScore, eval_record
from sapo_node.tasks import mixture
from sapo_node.tasks.base import MIN_EVAL_QUESTIONS, Judged, Question
from sapo_node.tasks.dataset import Row
from sapo_node.tasks.mixture import Entry, Mixture
from sapo_node.tasks.scoring import ScorerPool
from sapo_node.training.supervised import Policy, PolicyLost
from sapo_node.workers import Refused, WorkerError

SAMPLING_SEED: Final = 20250908  # any fixed number; another one makes scores incomparable with earlier ones
QUESTIONS_AT_ONCE: Final = 32
"""In one call to the engine: bounds its memory and how long a stop has to wait. Fixed, since the sampling noise depends
on it."""


class Stopped(Exception):
    """The evaluation was stopped before its end; there is no score."""


class NothingHeldOut(SapoError):
    """No task of the mixture has enough held-out questions."""


class HeldOutQuestion(Struct, frozen=True, kw_only=True):
    """One evaluation question."""

    entry: Entry
    question: Question
    seed: int = 0  # of a ReasoningGYM question
    row: Row | None = None  # of a data set


class HeldOut:
    """The evaluation of one node."""

    def __init__(self, config: NodeConfig, questions: list[HeldOutQuestion], left_out: list[str]) -> None:
        """Use `prepare`."""
        self.config = config
        self.questions = questions
        self.left_out = left_out

    @classmethod
    async def prepare(
        cls, config: NodeConfig, mixture: Mixture, scorers: ScorerPool, wanted: int | None = None
    ) -> "HeldOut":
        """Find `wanted` (default `tasks.eval_questions`) questions a task; tasks with fewer than 30 are left out."""
        per_task = wanted or config.tasks.eval_questions
        questions: list[HeldOutQuestion] = []
        left_out: list[str] = []
        for entry in mixture.entries:
            found = await _eval_questions(scorers, entry, per_task)
            if len(found) < MIN_EVAL_QUESTIONS:
                left_out.append(entry.spec.name)
            else:
                questions += found
        return cls(config, questions, left_out)

    async def score(
        self,
        engine: InferenceEngine,
        scorers: ScorerPool,
        *,
        round: int,
        samples: int | None = None,
        stop: asyncio.Event | None = None,
    ) -> EvalRecord:
        """Mean strict reward of `samples` (default `tasks.eval_samples`) completions a question, pass@1.

        Raises NothingHeldOut without questions, Stopped soon after `stop` is set, and whatever the engine raises.
        """
        if not self.questions:
            raise NothingHeldOut(
                f"none of the tasks {', '.join(self.left_out)} has {MIN_EVAL_QUESTIONS} held-out questions (about one "
                "question in ten is held out): widen a task's settings, or give a data set 300 rows and more"
            )
        started = time.monotonic()
        params = SamplingParams(
            n=samples or self.config.tasks.eval_samples,
            max_tokens=self.config.inference.max_completion_tokens,
            temperature=self.config.inference.temperature,
            seed=SAMPLING_SEED,
        )
        scores: list[QuestionScore] = []
        version = 0
        for start in range(0, len(self.questions), QUESTIONS_AT_ONCE):
            if stop is not None and stop.is_set():
                raise Stopped
            chunk = self.questions[start : start + QUESTIONS_AT_ONCE]
            batch = await engine.sample([one.question.text for one in chunk], params)
            version = batch.policy_version
            judged = await asyncio.gather(
                *(
                    _judge(scorers, one, [sampled.text for sampled in group])
                    for one, group in zip(chunk, batch.groups, strict=True)
                )
            )
            scores += [_question_score(one, result.rewards) for one, result in zip(chunk, judged, strict=True)]
        return eval_record(
            scores,
            round=round,
            time=time.time(),
            policy_version=version,
            samples=params.n,
            left_out=self.left_out,
            seconds=time.monotonic() - started,
        )


def _question_score(one: HeldOutQuestion, rewards: list[float]) -> QuestionScore:
    """A question whose prompt is too long stays unanswered, which counts as wrong."""
    return QuestionScore(one.entry.spec.name, one.question.sha256.hex()[:HASH_PREFIX], fmean(rewards or [0.0]))


def run(*, loaded: Loaded, checkpoint: Path | None, samples: int, as_json: bool) -> int:
    """`sapo-node eval`: measure a checkpoint (default: the node's newest, else the base model) and print the scores."""
    config = loaded.config
    folder: Path | None = config.node.data_dir / "checkpoints"
    if checkpoint is not None:
        training = config.training.model_copy(update={"model": str(checkpoint.absolute())})
        config, folder = config.model_copy(update={"training": training}), None
    record = asyncio.run(_measure(config, folder, samples))
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(record)))
        return 0
    for task, score in record.scores.items():
        click.echo(f"{task:<28} {score:.3f}")
    click.echo(f"{'all':<28} {record.mean:.3f}  ({record.questions} held-out questions, {samples} completions each)")
    if record.left_out:
        click.echo(f"left out, fewer than {MIN_EVAL_QUESTIONS} held-out questions: {', '.join(record.left_out)}")
    return 0


async def _measure(config: NodeConfig, checkpoints: Path | None, samples: int) -> EvalRecord:
    tasks = mixture.load(config.tasks)
    async with contextlib.AsyncExitStack() as stack:
        scorers = ScorerPool(config.tasks.scorers, config.tasks.answer_seconds, config.tasks.answer_form)
        stack.push_async_callback(scorers.close)
        policy = Policy(config, checkpoints)
        stack.push_async_callback(policy.close)
        try:
            await scorers.start()
            info = await policy.start()
            click.echo(f"{info.name}, {policy.version} steps", err=True)
            held = await HeldOut.prepare(config, tasks, scorers)
            return await held.score(policy, scorers, round=policy.version, samples=samples)
        except (Refused, PolicyLost, WorkerError) as error:
            raise SapoError(str(error)) from error


async def _eval_questions(scorers: ScorerPool, entry: Entry, wanted: int) -> list[HeldOutQuestion]:
    if entry.rows is None:
        pairs = await scorers.eval_questions(entry.spec, wanted)
        return [HeldOutQuestion(entry=entry, seed=seed, question=question) for seed, question in pairs]
    return [HeldOutQuestion(entry=entry, question=row.asked(), row=row) for row in entry.rows.eval_rows[:wanted]]


async def _judge(scorers: ScorerPool, one: HeldOutQuestion, texts: list[str]) -> Judged:
    if one.row is None:
        return await scorers.judge(one.entry.spec, one.seed, texts)
    return await scorers.judge_row(one.row.question, one.row.answer, one.entry.verifier, texts)
