"""The node's place in the swarm, from p2pd up, kept running: for a node that trains, and for a bootstrap peer.

One *connection* is a p2pd with the DHT node, the exchange and the search for peers on it. When p2pd dies, or hivemind
loses it, the connection ends as a whole and the next one starts after a growing pause; the node trains on meanwhile.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any, Final, Literal

import structlog

from sapo_node import licence
from sapo_node.config import NodeConfig
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.identity import Identity
from sapo_node.rollouts.codec import Rejected
from sapo_node.rollouts.pool import Pool
from sapo_node.rollouts.schema import Batch, Group, ModelCard
from sapo_node.swarm.bootstrap import Bootstrap, JoinState, Outcome, Result
from sapo_node.swarm.candidates import Candidates, public_peers
from sapo_node.swarm.denials import Denials, DenialsUnreadable
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.discovery import RECORD_SECONDS, REWRITE_SECONDS
from sapo_node.swarm.exchange import Exchange, ExchangeStats
from sapo_node.swarm.hello import Greeter
from sapo_node.swarm.outbox import Outbox
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import NetworkError, PortInUse, check_port_is_free
from sapo_node.swarm.peers import PeerBook, load_peers, save_peers
from sapo_node.swarm.protocol import PROTO
from sapo_node.swarm.rendezvous import Rendezvous
from sapo_node.swarm.sealed import start_network
from sapo_node.swarm.secret import Secret

log = structlog.get_logger(__name__)

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0
SAVE_PEERS_SECONDS: Final = 10.0  # `sapo-node peers` reads what is saved
SAVE_NEWS_SECONDS: Final = 2.0  # once others are connected than before
MAX_UNREACHED: Final = 8
DENY_SECONDS: Final = 1.0  # between two looks at whom the owner denied
PUBLISH_SECONDS: Final = 0.05  # between two looks at what waits to leave
ADDRESS_SECONDS: Final = 2.0  # between two looks at our own addresses: a router may give us new ones

Consume = Callable[[Exchange], Coroutine[Any, Any, None]]
Role = Literal["trainer", "bootstrap"]

TRAINERS_CORES: Final = 1
"""On which p2pd of a node that trains runs at a time: it needs a tenth of one, and whatever strangers send has to leave
the others to training. A stream costs it a little less so, too. A bootstrap peer, which does nothing else, has all."""


class SwarmService:
    """The swarm as the node sees it: `run` or `serve` keeps it up, `publish` offers groups, the rest says how it is."""

    def __init__(self, config: NodeConfig, identity: Identity, data: DataDir) -> None:
        """Raises SapoError for a file with the swarm's key that cannot be used."""
        file = config.swarm.secret_file
        self._secret = Secret.load(file, config.swarm.name) if file is not None else None
        self._config = config
        self._identity = identity
        self._data = data
        self._denials = Denials(data.denied)
        known, told = load_peers(data.peers)
        if told:
            log.warning(told)
        self.book = PeerBook(allow=config.swarm.allow, deny=config.swarm.deny, known=known)
        self._obey()
        self.addresses: list[str] = []
        self.stats = ExchangeStats()
        self.connections = 0
        self._exchange: Exchange | None = None
        self._ways: Callable[[], list[str]] = list
        self._outbox = Outbox(REWRITE_SECONDS)

    @property
    def peers(self) -> int:
        """Other nodes of this swarm that announced groups and are connected, or did so a short time ago and have not
        gone since."""
        if self._exchange is None:
            return 0
        since = time.time() - RECORD_SECONDS
        announced = {peer_id: at for peer_id, at in self._exchange.heard().items() if self.book.may(peer_id)}
        heard = [(at >= since, self.book.there(peer_id, at)) for peer_id, at in announced.items()]
        return sum(recent if there is None else there for recent, there in heard)

    @property
    def unreached(self) -> list[str]:
        """Sentences on the owner's ways to join that lead nowhere now, at most MAX_UNREACHED."""
        return self._ways()[:MAX_UNREACHED]

    def check_ports(self) -> None:
        """Raise SapoError for a port that another process listens on: p2pd would share it silently."""
        for address in self._config.swarm.listen:
            try:
                check_port_is_free(address)
            except NetworkError as error:
                raise SapoError(f"swarm.listen: {error}") from error

    async def publish(self, groups: list[Group]) -> None:
        """Offer groups to the swarm; they leave with the next batch. Without a connection they wait, within bounds."""
        self._outbox.put(groups)

    async def run(self, pool: Pool, card: ModelCard, want: Callable[[], int], consume: Consume) -> None:
        """Share groups until cancelled. Raises SapoError for a port that is taken at the start; a port that is lost
        later is waited for, since a node that trains must not end for it."""

        def work(exchange: Exchange, group: asyncio.TaskGroup) -> None:
            group.create_task(self._publish_loop(exchange, pool, card), name="publish")
            group.create_task(consume(exchange), name="arrivals")

        async def connection() -> None:
            await self._connection("trainer", await pool.next_seq("announcement"), want, work)

        self._tell_ways("trainer")
        await self._keep_up(connection)

    async def serve(self) -> None:
        """Only be there for others to join by, and hold their announcements, until cancelled. Raises as `run`."""
        self._tell_ways("bootstrap")
        await self._keep_up(lambda: self._connection("bootstrap", 0, lambda: 0, lambda exchange, group: None))

    async def _keep_up(self, connection: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One connection after another."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            started = time.monotonic()
            try:
                await connection()
            except* NetworkError as group:
                error = _first(group)
                if isinstance(error, PortInUse) and not self.connections:
                    raise SapoError(str(error)) from error
                log.warning("the network is down; it starts again", reason=str(error), again_in=pause)
            if time.monotonic() - started > LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)

    def _tell_ways(self, role: Role) -> None:
        """Say what the owner should know about the ways to join that are set, and about what he shares."""
        settings = self._config.swarm
        if role == "trainer" and (note := licence.note(self._config)):
            log.warning(note)
        if self._secret is not None:
            log.info("this swarm is private: its members are who has its key", keys=self._secret.keys)
        elif role == "trainer" and settings.public_peers and not public_peers(settings.name):
            log.info(
                f"nobody runs a public bootstrap peer for swarm {settings.name} yet; "
                "`sapo-node bootstrap` hosts one (docs/operations.md)"
            )
        if settings.rendezvous:
            log.warning(
                "swarm.rendezvous is on: this node's IP address and peer id are published in the public IPFS DHT, for "
                + ("anyone who knows the swarm's name" if self._secret is None else "anyone who looks around there")
            )

    async def _connection(
        self, role: Role, seq_start: int, want: Callable[[], int], work: Callable[[Exchange, asyncio.TaskGroup], None]
    ) -> None:
        """One life of the network; `work` starts what this role does with the exchange."""
        settings = self._config.swarm
        network = await start_network(
            self._secret,
            self._identity,
            work_dir=self._data.path / "run",
            listen=settings.listen,
            announce=settings.announce,
            nat_port_map=settings.nat_port_map,
            pubsub=settings.push != "off",
            max_connections=settings.max_connections,
            dht_client=settings.rendezvous,
            cores=TRAINERS_CORES if role == "trainer" else 0,
        )
        dht: SwarmDHT | None = None
        try:
            network.denied = lambda peer_id: not self.book.welcome(peer_id, time.time())
            network.known_as = lambda peer_id: self.book.known_as(peer_id, time.time())
            network.reached = self.book.came_from
            await self._tell_addresses(network)
            dht = await SwarmDHT.start(network, settings.name, store_for_others=settings.store_for_others)
            greeter = Greeter(network, settings.name)
            await greeter.start()
            self._exchange = exchange = Exchange(
                network,
                dht,
                self._identity,
                settings.name,
                settings,
                max_age_seconds=self._config.rollouts.max_age_seconds,
                seq_start=seq_start,
                want=want,
                book=self.book,
                version=version("sapo-node"),
                roles=[role],
            )
            self.stats = self._exchange.stats
            self.connections += 1
            candidates = Candidates(settings, self.book, log.warning)
            bootstrap = Bootstrap(network, dht, greeter, candidates, self.book, self._tell_outcome)
            self._ways = lambda: [*candidates.faults, *bootstrap.unreached]
            async with asyncio.TaskGroup() as group:
                group.create_task(self._end_with_p2pd(network), name="p2pd")
                group.create_task(self._follow_denials(network), name="denials")
                group.create_task(candidates.run(), name="candidates")
                group.create_task(bootstrap.run(), name="bootstrap")
                group.create_task(exchange.run(), name="exchange")
                group.create_task(self._follow_addresses(network), name="addresses")
                group.create_task(self._save_peers(), name="peers")
                if settings.rendezvous:
                    rendezvous = self._rendezvous(network, candidates, bootstrap)
                    group.create_task(rendezvous.run(), name="rendezvous")
                work(exchange, group)
        finally:
            self._exchange, self._ways = None, list
            self.book.set_connected((), (), time.time())
            await self.save_peers()
            if dht is not None:
                await dht.close()
            await network.close()

    def _rendezvous(self, network: Network, candidates: Candidates, bootstrap: Bootstrap) -> Rendezvous:
        settings = self._config.swarm
        return Rendezvous(
            network,
            settings.name,
            settings.rendezvous_peers,
            met=candidates.meet,
            lonely=lambda: bootstrap.state is not JoinState.JOINED,
        )

    async def _end_with_p2pd(self, network: Network) -> None:
        raise NetworkError(await network.wait_dead())

    async def _follow_denials(self, network: Network) -> None:
        """Hear the owner's commands; who is newly denied loses its connections, and what runs over them."""
        while True:
            try:
                lost = self._obey() if self._denials.changed() else frozenset()
            except DenialsUnreadable as error:
                log.error("what was said by `sapo-node peers deny` and `allow` before holds on", reason=str(error))
                lost = frozenset()
            try:
                for peer_id in lost & set(await network.peers()) if lost else ():
                    await network.disconnect(peer_id)
            except NetworkError as error:  # they get nothing over these connections either
                log.debug("a denied peer was not disconnected: %s", error)
            await asyncio.sleep(DENY_SECONDS)

    def _obey(self) -> frozenset[str]:
        """Take over what the owner said by command; the peers that were not denied before."""
        words, before = self._denials.words, self.book.denied
        self.book.denied = frozenset(peer_id for peer_id, word in words.items() if word.denied)
        self.book.purge_until = {peer_id: word.purge_until for peer_id, word in words.items() if word.purge}
        if new := self.book.denied - before:
            log.info("denied by command", peers=sorted(new))
        if back := before - self.book.denied:
            log.info("no longer denied by command", peers=sorted(back))
        return new

    async def _publish_loop(self, exchange: Exchange, pool: Pool, card: ModelCard) -> None:
        while True:
            for groups in self._outbox.take(time.monotonic()):
                batch = Batch(
                    proto=PROTO,
                    swarm=self._config.swarm.name,
                    peer_id=self._identity.peer_id,
                    seq=await pool.next_seq("batch"),
                    created_at=time.time(),
                    model=card,
                    groups=groups,
                )
                try:
                    await exchange.publish(batch)
                except Rejected as error:
                    log.warning("own groups break a limit of the wire and stay here", reason=str(error))
            await asyncio.sleep(PUBLISH_SECONDS)

    def _tell_outcome(self, outcome: Outcome) -> None:
        tell = log.info if outcome.result in (Result.CONNECTED, Result.ITSELF) else log.warning
        tell(outcome.message)

    async def _tell_addresses(self, network: Network) -> None:
        self.addresses = [f"{address}/p2p/{network.peer_id}" for address in await network.addresses()]
        log.info("listening", peer_id=network.peer_id, addresses=self.addresses)

    async def _follow_addresses(self, network: Network) -> None:
        while True:
            await asyncio.sleep(ADDRESS_SECONDS)
            found = [f"{address}/p2p/{network.peer_id}" for address in await network.addresses()]
            if set(found) != set(self.addresses):
                log.info("reachable at", addresses=found)
            self.addresses = found

    async def _save_peers(self) -> None:
        saved, saved_at = self.book.connected(), time.monotonic()
        while True:
            await asyncio.sleep(SAVE_NEWS_SECONDS)
            connected = self.book.connected()
            if connected != saved or time.monotonic() - saved_at >= SAVE_PEERS_SECONDS:
                saved, saved_at = connected, time.monotonic()
                await self.save_peers()

    async def save_peers(self) -> None:
        """Remember the peers met, for the next start."""
        try:
            await save_peers(self._data.peers, self.book.to_save(time.time()))
        except OSError as error:
            log.warning("the peers met could not be saved", file=str(self._data.peers), reason=str(error))


def _first(group: BaseExceptionGroup[NetworkError]) -> NetworkError:
    """The first error of a group, however deep it lies."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, NetworkError)
    return error
