"""Task specs for the tests of this folder."""

from sapo_node.rollouts.schema import ConfigValue
from sapo_node.tasks.base import TaskSpec
from sapo_node.tasks.catalog import library_version


def spec(name: str, **config: ConfigValue) -> TaskSpec:
    """A ReasoningGYM task of the installed version."""
    return TaskSpec(source="reasoning_gym", name=name, version=library_version(), config=config)
