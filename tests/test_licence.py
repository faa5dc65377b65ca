"""When an owner is told that nobody can know under which licence a model's answers travel."""

from typing import Any

import pytest

from sapo_node import licence
from sapo_node.config import NodeConfig


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"training": {"model": "org/model"}}, True),
        ({"training": {"model": "org/model", "licence": " Unknown "}}, True),
        ({"training": {"model": "org/model", "licence": "mit"}}, False),
        ({"training": {"model": "demo"}}, False),
        ({"training": {"model": "org/model"}, "swarm": {"enabled": False}}, False),
    ],
)
def test_a_licence_that_is_not_named_is_told_where_answers_are_shared(settings: dict[str, Any], told: bool) -> None:
    note = licence.note(NodeConfig.model_validate(settings))
    assert (note is not None) == told
    assert note is None or "org/model" in note
