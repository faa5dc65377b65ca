"""Groups of others: from the exchange, through verification, into the pool; and how many more are wanted.

A node wants a stock of usable groups a few times J, so that the sampler has a choice; when it has them it fetches
nothing. What a batch was worth goes into its sender's score.
"""

import asyncio
import time
from collections import Counter
from typing import Final

import structlog

from sapo_node.config import NodeConfig
from sapo_node.identity import Identity
from sapo_node.rollouts.pool import Pool
from sapo_node.rollouts.sampling import Clock
from sapo_node.rollouts.verify import Reason, Verified, Verifier
from sapo_node.swarm.exchange import Exchange, Received
from sapo_node.swarm.peers import PeerBook
from sapo_node.tasks.mixture import Mixture
from sapo_node.tasks.scoring import ScorerPool
from sapo_node.training.sapo import informative

log = structlog.get_logger(__name__)

STOCK_ROUNDS: Final = 8
"""Usable groups kept in stock, in rounds of J. More would be older when they are used, fewer leaves no choice."""

STOCK_SECONDS: Final = 0.5  # between two looks at the stock; it also changes with every batch that arrives
TELL_EVERY_SECONDS: Final = 60.0  # a peer that sends nonsense all day gets a line a minute, not one a batch


class Arrivals:
    """The receiving side of one node."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        mixture: Mixture,
        scorers: ScorerPool,
        pool: Pool,
        book: PeerBook,
        clock: Clock = time.time,
    ) -> None:
        self._target = STOCK_ROUNDS * config.training.external_groups
        self._pool = pool
        self._book = book
        self._clock = clock
        self._stock = 0
        self._told = float("-inf")
        self.counts: Counter[str] = Counter()  # groups by outcome since the start
        self.reasons: Counter[Reason] = Counter()  # groups by reason since the start
        self._verifier = Verifier(
            swarm=config.swarm.name,
            public_key=identity.public_key,
            accept=config.tasks.accept,
            mixture=mixture,
            max_age_seconds=config.rollouts.max_age_seconds,
            judge=scorers,
            known=pool,
            max_completions=config.rollouts.completions_per_task,
        )

    def want(self) -> int:
        """Groups that this node could use beyond those it has."""
        return max(0, self._target - self._stock)

    async def consume(self, exchange: Exchange) -> None:
        """Take over what the exchange receives, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_stock(), name="stock")
            async for received in exchange.subscribe():
                await self.take(received)

    async def _watch_stock(self) -> None:
        while True:
            await self.count_stock()
            await asyncio.sleep(STOCK_SECONDS)

    async def count_stock(self) -> None:
        """Look at the pool; `want` follows from it."""
        candidates = await self._pool.external_candidates(self._clock())
        self._stock = sum(informative(candidate.rewards) for candidate in candidates)

    async def take(self, received: Received) -> None:
        """Verify one batch, and put what is good of it into the pool."""
        opened, now = received.opened, self._clock()
        if not self._book.welcome(opened.batch.peer_id, now):
            return  # fetched before its sender was shunned; all of those would still cost their share of scorers
        if await self._pool.seen([opened.content_id]):
            self._book.ignored(received.peer_id, len(opened.batch.groups), now)
            return
        verified = await self._verifier.verify(opened, now)
        await self._pool.add_external(verified.producer, verified.content_id, verified.groups, now)
        await self.count_stock()
        self._judge_sender(verified, now)

    def _judge_sender(self, verified: Verified, now: float) -> None:
        self.reasons.update(verified.reasons)
        counts = verified.counts
        for outcome, groups in counts.items():
            self.counts[outcome] += groups
        if counts["accept"]:
            self._book.accepted(verified.producer, counts["accept"], verified.usable, now)
        if counts["ignore"]:
            self._book.ignored(verified.producer, counts["ignore"], now)
        if counts["reject"]:
            self._book.rejected(verified.producer, now)
            if now - self._told > TELL_EVERY_SECONDS:
                self._told = now
                why = sorted({reason.value for reason in verified.reasons if reason.outcome == "reject"})
                log.warning("a peer sent groups that no honest node sends", peer=verified.producer, reasons=why)
