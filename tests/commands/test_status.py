"""`sapo-node status`: what it prints of a node's own words."""

import time
from pathlib import Path

from sapo_node.commands import status as command
from sapo_node.monitor.status import NodeStatus


def status(**fields: object) -> NodeStatus:
    now = time.time()
    return NodeStatus(**{"pid": 1, "state": "training", "started_at": now, "updated_at": now, **fields})  # type: ignore[arg-type]


def test_addresses_and_ways_that_lead_nowhere_have_a_line_each() -> None:
    text = command.table(Path("d"), True, status(addresses=["/a", "/b"], unreached=["/c does not answer"]), time.time())
    assert "addresses  /a\n           /b\n" in text
    assert "unreached  /c does not answer\n" in text


def test_what_a_node_that_has_ended_could_not_reach_is_not_told() -> None:
    assert "unreached" not in command.table(Path("d"), False, status(unreached=["/c does not answer"]), time.time())


def test_no_field_writes_to_the_terminal() -> None:
    evil = "x\x1b[2J\x1b]0;pwn\x07\x9b31m\u202e\nforged  line"
    fields = dict.fromkeys(("reason", "engine", "engine_state", "model", "swarm", "peer_id"), evil)
    text = command.table(Path("d"), True, status(addresses=[evil], unreached=[evil], **fields), time.time())
    assert text.replace("\n", "").isprintable()
    assert not any(line.startswith("forged") for line in text.splitlines())
