"""What a peer that asks without end costs p2pd: on one connection, and where it is cut off and comes back.

    python scripts/bench/connections.py --times 500
    python scripts/bench/connections.py --times 500 --cores 0

Two p2pd on loopback, each held to one core as a node's is (`--cores 0`: to none). One of them opens streams to the
other, one after another, in several variants that take turns. Told are the CPU milliseconds of p2pd a stream, at both
ends. "cut off": the node asked closes all connections to the peer after each stream, so the next one begins with a
handshake. p2pd has no gate: who was cut off may come back at once.
"""

import asyncio
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
from hostile_bench import procfs

from sapo_node.identity import Identity
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.service import TRAINERS_CORES

PROTOCOL = "/sapo/bench/connections"
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
ROUNDS = 5  # of all variants
MOST_LOOKS = 5000  # at the peer's connections, a millisecond apart


class Pair:
    """The node that is asked, and the peer that asks it."""

    def __init__(self, asked: Network, peer: Network) -> None:
        self.asked, self.peer = asked, peer

    async def stream(self) -> None:
        """One stream, whose four bytes are answered by four."""
        reader, writer = await self.peer.open_stream(self.asked.peer_id, PROTOCOL)
        writer.write(b"here")
        await reader.read(4)
        writer.close()

    async def cut_off(self) -> None:
        """The same by a peer that loses its connection by it."""
        await self.stream()
        await self.asked.disconnect(self.peer.peer_id)
        for _ in range(MOST_LOOKS):  # else the next stream goes over what is being closed
            if self.asked.peer_id not in await self.peer.peers():
                return
            await asyncio.sleep(0.001)
        raise click.ClickException("a connection that was closed at one end is still there at the other")

    async def told_apart(self) -> None:
        """What `cut_off` costs without cutting: a stream and the same questions to p2pd."""
        await self.stream()
        await self.asked.peers()
        await self.peer.peers()

    async def measure(self, operation: Callable[[], Awaitable[None]], times: int) -> tuple[float, float]:
        """CPU milliseconds of both p2pd for one operation: of the node asked, of the peer."""
        pids = [network.daemon.pid for network in (self.asked, self.peer)]
        before = [procfs.look()[pid].cpu_seconds for pid in pids]
        for _ in range(times):
            await operation()
        after = [procfs.look()[pid].cpu_seconds for pid in pids]
        asked, peer = ((b - a) * 1000 / times for a, b in zip(before, after, strict=True))
        return asked, peer


async def answer(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one stream."""
    writer.write(await reader.readexactly(4))
    await writer.drain()


async def run(times: int, cores: int) -> None:
    """Take all variants in turn, and tell their medians."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    networks: list[Network] = []
    with tempfile.TemporaryDirectory(prefix="sapo-") as folder:
        try:
            for index in range(2):
                work = Path(folder) / str(index)
                work.mkdir()
                identity = Identity.load_or_create(work / "identity.key")
                networks.append(await Network.start(identity, work_dir=work, listen=LISTEN, pubsub=False, cores=cores))
            pair = Pair(*networks)
            await pair.asked.serve_stream(PROTOCOL, answer)
            await pair.peer.connect(f"{(await pair.asked.addresses())[0]}/p2p/{pair.asked.peer_id}")
            variants = {"one connection": pair.stream, "the same, p2pd asked": pair.told_apart, "cut off": pair.cut_off}
            for _ in range(ROUNDS):
                for name, operation in variants.items():
                    found[name].append(await pair.measure(operation, times))
                    click.echo(".", nl=False, err=True)
        except NetworkError as error:
            raise click.ClickException(str(error)) from error
        finally:
            for network in networks:
                await network.close()
    click.echo(err=True)
    click.echo("| a stream | CPU ms of the node asked | of the peer |\n|---|---|---|")
    for name, values in found.items():
        asked, peer = ([one[side] for one in values] for side in (0, 1))
        click.echo(
            f"| {name} | {statistics.median(asked):.2f} ({min(asked):.2f}, {max(asked):.2f}) "
            f"| {statistics.median(peer):.2f} ({min(peer):.2f}, {max(peer):.2f}) |"
        )


@click.command()
@click.option("--times", default=500, show_default=True, type=click.IntRange(1, 10_000), help="Streams a variant.")
@click.option("--cores", default=TRAINERS_CORES, show_default=True, type=click.IntRange(0), help="0: all.")
def main(times: int, cores: int) -> None:
    """What a stream costs p2pd, and one that begins with a handshake."""
    asyncio.run(run(times, cores))


if __name__ == "__main__":
    main()
