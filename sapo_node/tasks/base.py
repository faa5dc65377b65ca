"""The vocabulary of tasks: what a problem is, how it is addressed, and which problems belong to evaluation.

A *task* is a named generator of questions with a configuration (`TaskSpec`); a *question* is one text. Questions and
truths are computed only inside the scorer sandbox (`scoring.py`): its inputs may come from strangers.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

from sapo_node.rollouts.schema import ConfigValue

Source = Literal["reasoning_gym", "dataset"]
AnswerForm = Literal["any", "tags", "bare", "exact"]

# A question whose sha256 begins with a byte below this (about 10 %) belongs to evaluation in the whole swarm: nobody
# draws, shares or trains on it. Another value and nodes would train on each other's evaluation questions.
EVAL_FIRST_BYTE = 26

DIGEST_BYTES = 16  # of an answer's digest: answers are compared within one task, by this node alone

MAX_EVAL_QUESTIONS = 100  # a task; the list is fixed, so more would only make evaluation slower
MIN_EVAL_QUESTIONS = 30  # a task with fewer distinct held-out questions is left out of `eval`: too noisy to report


class TaskRefused(Exception):
    """This task or configuration is not generated here; the message says why, for the owner of the node."""

    cpu: float = 0.0  # seconds of a scorer's computing until that was known


class TaskSpec(Struct, frozen=True, kw_only=True):
    """A task with its configuration, by value. `config` holds the explicit settings only (defaults stay out)."""

    source: Source
    name: str
    version: str
    config: dict[str, ConfigValue]

    @property
    def config_hash(self) -> bytes:
        """32 bytes; equal for configurations that differ in key order only."""
        return config_hash(self.config)


class Question(Struct, frozen=True, kw_only=True):
    """A regenerated question. The truth stays in the sandbox; only a digest of it comes out (`Judged`)."""

    text: str
    sha256: bytes


class Judged(Struct, frozen=True, kw_only=True):
    """A question and the strict rewards (0.0 or 1.0) of the answers that were judged with it, in their order."""

    question: Question
    rewards: list[float]
    truth: bytes = b""  # `answer_digest` of the question's own true answer; empty: unknown
    cpu: float = 0.0  # seconds of a scorer's computing


def config_hash(config: Mapping[str, ConfigValue]) -> bytes:
    """sha256 over the canonical JSON (sorted keys, no spaces, ASCII) of a task's configuration; 32 bytes.

    Raises ValueError for NaN and infinities, which JSON cannot carry.
    """
    text = json.dumps(dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def question_sha256(question: str) -> bytes:
    """sha256 over the UTF-8 of a question; 32 bytes. Lone surrogates cannot be encoded and raise ValueError."""
    return hashlib.sha256(question.encode()).digest()


def is_eval_question(sha256: bytes) -> bool:
    """Whether a question belongs to evaluation for the whole swarm."""
    return sha256[0] < EVAL_FIRST_BYTE


def extract_answer(completion: str) -> str:
    """The last `<answer>...</answer>`, else the whole text; stripped."""
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, end) if end >= 0 else -1
    return completion[start + len("<answer>") : end].strip() if start >= 0 else completion.strip()


def has_form(completion: str, form: AnswerForm) -> bool:
    """Whether a completion is written as `form` wants it.

    tags: it ends with its only `<answer>...</answer>`; what comes before is free. bare, exact: it is the answer alone,
    without space around it; what an exact one is besides, `reward_in_form` says.
    """
    if form in ("bare", "exact"):
        return completion == extract_answer(completion)
    if form == "tags":
        return (
            completion.endswith("</answer>")
            and completion.count("<answer>") == completion.count("</answer>") == 1
            and completion.index("<answer>") < completion.index("</answer>")
        )
    return True


def reward_in_form(completion: str, form: AnswerForm, truth: str, judge: Callable[[str], float]) -> float:
    """What `judge` gives the answer of a completion, and 0.0 for another form than `form`. An exact answer is the truth
    itself, and nobody is asked."""
    if form == "exact":
        return float(completion == truth.strip())
    return judge(extract_answer(completion)) if has_form(completion, form) else 0.0


def answer_digest(answer: str) -> bytes:
    """DIGEST_BYTES bytes; equal for answers that differ in capitals and white space only."""
    return hashlib.sha256("".join(answer.casefold().split()).encode(errors="replace")).digest()[:DIGEST_BYTES]
