"""Groups of others: from the exchange, through verification, into the pool; and how many more are wanted.

A node wants a stock of usable groups a few times J, so that the sampler has a choice; when it has them it fetches
nothing. Where the sampler tells sources apart (rule `capped`) no source counts for more than a quarter of it, and half
is kept for aged peers as long as there are any: newcomers can be a hundred times as many, and would fill it before.
What a batch was worth goes into its sender's score.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

import structlog

from sapo_node.config import NodeConfig
from sapo_node.identity import Identity
from sapo_node.monitor.alarms import Sender
from sapo_node.monitor.watch import Unwatched, Watch
from sapo_node.rollouts.pool import Pool
from sapo_node.rollouts.quarantine import Quarantine
from sapo_node.rollouts.sampling import Clock
from sapo_node.rollouts.verify import Reason, Verified, Verifier
from sapo_node.swarm.exchange import Exchange, Received
from sapo_node.swarm.peers import PeerBook
from sapo_node.tasks.mixture import Mixture
from sapo_node.tasks.scoring import ScorerPool
from sapo_node.training.sapo import PEER_SHARE

log = structlog.get_logger(__name__)

STOCK_ROUNDS: Final = 8
"""Usable groups kept in stock, in rounds of J. More would be older when they are used, fewer leaves no choice."""

EXPIRE_SECONDS: Final = 60.0  # between two looks at what became too old; the end of a round looks too, if there is one
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
        watch: Watch | None = None,
    ) -> None:
        """`watch` sees what is accepted, and says of which tasks nothing is."""
        self._watch = watch or Unwatched()
        self._target = STOCK_ROUNDS * config.training.external_groups
        self._missing = self._target
        self._licences = {licence.strip().lower() for licence in config.swarm.accept_licences}
        self._purged: dict[str, float] = {}
        self._pool = pool
        self._book = book
        self._clock = clock
        book.fair = config.training.rule == "capped"
        self._told = float("-inf")
        self._expired = clock()
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
            quarantine=Quarantine(book),
            max_completions=config.rollouts.completions_per_task,
            barred=self._barred,
            training=config.training,
        )

    def want(self) -> int:
        """Groups that this node could use beyond those it has."""
        return self._missing

    async def consume(self, exchange: Exchange) -> None:
        """Take over what the exchange receives, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_stock(), name="stock")
            async for received in exchange.subscribe():
                if (usable := await self.take(received)) is not None:
                    exchange.judged(received, useful=usable > 0)

    async def _watch_stock(self) -> None:
        while True:
            await self.purge()
            await self.expire()
            await self.count_stock()
            await asyncio.sleep(STOCK_SECONDS)

    async def expire(self) -> None:
        """End, now and then, what ends by time alone: groups come in also while a round waits, or cannot be taken."""
        now = self._clock()
        if 0 <= now - self._expired < EXPIRE_SECONDS:  # a clock that was set back starts anew
            return
        self._expired = now
        self._watch.look_again()
        await self._pool.expire_by_age(now)

    async def count_stock(self) -> None:
        """Look at the pool; `want`, and from whom, follows from it."""
        now, book = self._clock(), self._book
        candidates = await self._pool.external_candidates(now)
        usable = [c.producer for c in candidates if not self._barred(c.task, b"", c.producer)]
        book.enough_aged, book.enough_new, book.full = False, False, frozenset()
        if not book.fair:
            self._missing = max(0, self._target - len(usable))
            return
        aged_part = self._target - self._target // 2 if book.aged_about(now) else 0
        if not aged_part:
            self._missing = self._lacking(usable, self._target)
            return
        aged = [producer for producer in usable if book.aged(producer, now)]
        new = [producer for producer in usable if not book.aged(producer, now)]
        missing_new = self._lacking(new, self._target - aged_part)
        missing_aged = self._lacking(aged, aged_part)
        book.enough_new, book.enough_aged = not missing_new, not missing_aged
        self._missing = missing_new + missing_aged

    def _barred(self, task: str, settings: bytes, producer: str) -> bool:
        return self._watch.bars(task, settings=settings, share=self._book.share(producer))

    def _lacking(self, producers: Iterable[str], wanted: int) -> int:
        """How many groups are missing to `wanted`, if no share counts for more than a quarter of them; one that has its
        quarter is full. Else one batch would be the whole choice, and its sender's part of J grow with it."""
        held = Counter(map(self._book.share, producers))
        part = math.ceil(PEER_SHARE * wanted)
        self._book.full |= {share for share, groups in held.items() if groups >= part}
        return max(0, wanted - sum(min(groups, part) for groups in held.values()))

    async def purge(self) -> None:
        """Remove the groups of peers that the owner wants to be rid of."""
        asked = dict(self._book.purge_until)
        for peer_id, until in asked.items():
            if self._purged.get(peer_id) != until:
                groups = await self._pool.purge(peer_id, until)
                log.info("groups of a denied peer were removed from the pool", peer=peer_id, groups=groups)
        self._purged = asked

    async def take(self, received: Received) -> int | None:
        """Verify one batch, and put what is good of it into the pool. Returns how many of its groups can be learned
        from, or None if that says nothing of its sender."""
        opened, now = received.opened, self._clock()
        if not self._book.welcome(opened.batch.peer_id, now):
            return None  # fetched before its sender was shunned; all of those would still cost their share of scorers
        groups = len(opened.batch.groups)
        if await self._pool.seen([opened.content_id]):
            self._book.ignored(received.peer_id, groups, now, Reason.DUPLICATE)
            return None  # after a restart what is in the pool comes again
        if self._licences and opened.batch.model.licence.strip().lower() not in self._licences:
            unjudged = Verified(
                producer=opened.batch.peer_id,
                content_id=opened.content_id,
                reasons=[Reason.LICENCE] * groups,
                groups=[],
            )
            await self._keep(unjudged, now)
            return 0
        verified = await self._verifier.verify(opened, now)
        if self._book.may(verified.producer):  # the owner may have denied it meanwhile
            await self._keep(verified, now)
        return verified.usable

    async def _keep(self, verified: Verified, now: float) -> None:
        await self._pool.add_external(verified.producer, verified.content_id, verified.groups, now)
        peer, book = verified.producer, self._book
        self._watch.external(verified.groups, Sender(peer, book.share(peer), book.network(peer)))
        self._judge_sender(verified, now)
        await self.count_stock()

    def _judge_sender(self, verified: Verified, now: float) -> None:
        self.reasons.update(verified.reasons)
        for task in verified.quarantined:
            log.warning("others' groups of a task are left aside for a while: trusted peers ask otherwise", task=task)
        counts, sender = verified.counts, verified.producer
        for outcome, groups in counts.items():
            self.counts[outcome] += groups
        if counts["accept"]:
            self._book.accepted(sender, counts["accept"], verified.usable, now)
        for reason, groups in Counter(verified.reasons).items():
            if reason.outcome == "ignore":
                self._book.ignored(sender, groups, now, reason)
        if counts["reject"]:
            why = sorted({reason.value for reason in verified.reasons if reason.outcome == "reject"})
            self._book.rejected(sender, now, why[0])
            if now - self._told > TELL_EVERY_SECONDS:
                self._told = now
                log.warning("a peer sent groups that no honest node sends", peer=sender, reasons=why)
