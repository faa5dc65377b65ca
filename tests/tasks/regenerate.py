"""Prints questions and truths of every task offered as JSON: `python -m tests.tasks.regenerate forward|backward`.

forward asks for items as a node does; backward opens each data set anew, in the opposite order of tasks and seeds. So
equal outputs of two processes also show that an item does not depend on what was generated before it.
"""

import json
import random
import sys

import reasoning_gym

from sapo_node.rollouts.schema import ConfigValue
from sapo_node.tasks import reasoning_gym as gym
from sapo_node.tasks.base import TaskRefused
from sapo_node.tasks.catalog import OFFERED, Int, Real, validate

SEEDS = (0, 1, 5, 123_456_789, 0x7FFFFFFF)


def at_bounds(name: str) -> dict[str, ConfigValue]:
    """The settings of a task with each field at the end of its range that a rule allows."""
    config: dict[str, ConfigValue] = {}
    for key, field in OFFERED[name].fields.items():
        if isinstance(field, Int | Real):
            config[key] = field.low if key.startswith("min_") else field.high
    if name == "basic_arithmetic":
        config["operators"] = ["+", "-", "*"]
    if name == "decimal_arithmetic":
        config["max_num_decimal_places"] = 10
    validate(name, config)
    return config


def made(name: str, config: dict[str, ConfigValue], seed: int, *, fresh: bool) -> list[str]:
    """[question, truth], or why there is none."""
    try:
        if fresh:
            entry = gym.entry(reasoning_gym.create_dataset(name, seed=seed, size=1, **config), name, seed)
        else:
            entry = gym.item(name, config, seed)
    except TaskRefused as refusal:
        return [str(refusal)]
    return [entry["question"], entry["answer"]]


def main() -> None:
    """Everything, keyed by task, settings and seed."""
    fresh = sys.argv[1] == "backward"
    keys = [(name, bounds, seed) for name in OFFERED for bounds in (False, True) for seed in SEEDS]
    if fresh:
        keys.reverse()
        random.seed(7)  # what a task takes from the process-wide generator must not matter
    found = {}
    for name, bounds, seed in keys:
        config = at_bounds(name) if bounds else {}
        found[f"{name} {'at its bounds' if bounds else 'by default'} {seed}"] = made(name, config, seed, fresh=fresh)
    print("\n" + json.dumps(found))  # a line of its own: an interpreter of bf prints dots


if __name__ == "__main__":
    main()
