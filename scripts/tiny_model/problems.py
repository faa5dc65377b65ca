"""ReasoningGYM problems for the supervised start of the tiny model, without the swarm's evaluation questions.

A problem is item 0 of a data set of size 1, as everywhere in the swarm. Which tasks there are is read from the
`tasks.mixture` of a node's configuration, so that the model and the nodes cannot disagree.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
import yaml

from sapo_node.config import NodeConfig, TaskEntry
from sapo_node.tasks.base import extract_answer, is_eval_question, question_sha256

# Each use of problems draws from seeds of its own; a swarm's seeds are spread over 31 bits.
SEEDS_PER_RUN = 100_000_000
SEEDS_PER_TASK = 1_000_000


@dataclass(frozen=True)
class Problem:
    """One question with an answer that scores 1.0."""

    task: str
    question: str
    answer: str
    dataset: Any  # the data set that asked it, which also judges answers
    entry: dict[str, Any]


def read_mixture(config: Path) -> list[TaskEntry]:
    """The tasks of a node's configuration file."""
    return NodeConfig(**yaml.safe_load(config.read_text())).tasks.mixture


def is_right(problem: Problem, completion: str) -> bool:
    """Whether a completion would be rewarded: its extracted answer scores at least 1.0.

    An answer equal to the truth needs no scorer, and for binary_matrix nothing else scores 1.0: its scorer evaluates
    any other text as Python, which has no place here.
    """
    answer = extract_answer(completion)
    if answer == problem.entry["answer"] or problem.task == "binary_matrix":
        return bool(answer == problem.entry["answer"])
    return bool(problem.dataset.score_answer(answer, problem.entry) >= 1.0)


def _problems(entry: TaskEntry, first_seed: int, held_out: bool) -> Iterator[Problem]:
    for seed in range(first_seed, first_seed + SEEDS_PER_TASK):
        dataset = reasoning_gym.create_dataset(entry.name, size=1, seed=seed & 0x7FFFFFFF, **entry.config)
        item = dataset[0]
        if is_eval_question(question_sha256(item["question"])) != held_out:
            continue
        # propositional_logic accepts many conclusions and names one.
        answer = item["answer"] if item["answer"] is not None else item["metadata"]["example_answer"]
        problem = Problem(entry.name, item["question"], answer, dataset, item)
        if is_right(problem, answer):  # propositional_logic's example is sometimes a trivial one, which pays less
            yield problem


def training_problems(mixture: list[TaskEntry], per_task: int, seed: int) -> dict[str, list[Problem]]:
    """`per_task` problems of each task, repeats included, none from the evaluation set."""
    problems = {}
    for number, entry in enumerate(mixture):
        source = _problems(entry, seed * SEEDS_PER_RUN + number * SEEDS_PER_TASK, held_out=False)
        problems[entry.name] = [next(source) for _ in range(per_task)]
    return problems


def evaluation_problems(mixture: list[TaskEntry], per_task: int) -> dict[str, list[Problem]]:
    """Up to `per_task` distinct held-out problems of each task; fewer where 40,000 seeds show no more."""
    problems = {}
    for entry in mixture:
        found: dict[str, Problem] = {}
        for problem in _problems(entry, 0, held_out=True):
            found.setdefault(problem.question, problem)
            seen_enough = problem.dataset.seed >= 40_000
            if len(found) == per_task or seen_enough:
                break
        problems[entry.name] = list(found.values())
    return problems


def shuffled(problems: dict[str, list[Problem]], seed: int) -> list[Problem]:
    """All problems in one list, in an order given by the seed."""
    everything = [problem for task in problems.values() for problem in task]
    random.Random(seed).shuffle(everything)
    return everything
