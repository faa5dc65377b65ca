"""What the attacks stand on: a sender and a verifier with real scorers, and loopback networks."""

import asyncio
from collections.abc import Iterator

import pytest

from sapo_node.tasks.scoring import ScorerPool
from tests.rollouts.test_verify import node
from tests.swarm.conftest import loopback, on_loopback

__all__ = ["loopback", "node", "on_loopback"]


@pytest.fixture(scope="package")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="package")
def scorers(runner: asyncio.Runner) -> Iterator[ScorerPool]:
    """One pool for all attacks: a start takes seconds."""
    scorers = ScorerPool(1, 2.0)
    runner.run(scorers.start())
    yield scorers
    runner.run(scorers.close())
